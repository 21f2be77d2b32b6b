"""The Python client: one uninterrupted stream, whatever happens to the orchestrators behind it.

    with Client("10.0.0.1:7800,10.0.0.2:7800") as client:
        stream = client.generate("Once upon a time", max_tokens=64)
        for token in stream:
            print(token.text, end="")
        print(stream.finish.usage)

`AsyncClient` is the same with `async with` and `async for`.
"""

from outrider.client.aio import AsyncClient, AsyncGeneration
from outrider.client.blocking import Client, Generation
from outrider.client.request import Message, Options
from outrider.net.tls import ClientTls, TlsError

__all__ = ["AsyncClient", "AsyncGeneration", "Client", "ClientTls", "Generation", "Message", "Options", "TlsError"]
