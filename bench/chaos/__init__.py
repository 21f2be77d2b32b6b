"""A whole system of processes to break while clients stream: proxies, processes, faults, clients that keep count."""
