"""gRPC plumbing: channels, servers, errors, arrays."""
