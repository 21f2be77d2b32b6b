"""`outrider generate`: one generation, streamed, every token coloured by where it comes from."""

import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.access import Connection, PlainToken, Reach, Tls, TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile
from outrider.cli.client import generate_choices as call
from outrider.cli.options import DEFAULT_ADDRESS, PROPOSERS, Address, ProposerName
from outrider.cli.report import logprob_table, summary
from outrider.cli.request import set_fields, set_grammar, set_input, set_prediction, set_tokens
from outrider.cli.run import Failure, run
from outrider.cli.tokens import TokenWriter
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1 import target_pb2


class AcceptanceName(StrEnum):
    """Acceptance rules as the command line spells them."""

    greedy = "greedy"
    ratio = "ratio"
    block = "block"
    coupled = "coupled"


class RowFormatName(StrEnum):
    """Row formats as the command line spells them."""

    logits = "logits"
    support = "support"
    sample = "sample"


ACCEPTANCE = {
    AcceptanceName.greedy: pb.ACCEPTANCE_GREEDY,
    AcceptanceName.ratio: pb.ACCEPTANCE_RATIO,
    AcceptanceName.block: pb.ACCEPTANCE_BLOCK,
    AcceptanceName.coupled: pb.ACCEPTANCE_COUPLED,
}
_ROW_FORMAT = {
    RowFormatName.logits: target_pb2.ROW_FORMAT_LOGITS,
    RowFormatName.support: target_pb2.ROW_FORMAT_SUPPORT,
    RowFormatName.sample: target_pb2.ROW_FORMAT_SAMPLE,
}


def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue or to answer; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="A message to the model, or text to go on with.")] = True,
    system: Annotated[str, typer.Option(help="System message before a chat message.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    min_tokens: Annotated[int, typer.Option(help="Tokens before the output may end.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the sequence.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the default is 1.")] = None,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this mass.")] = None,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely beside the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float | None, typer.Option(help="Divides logits of tokens seen before.")] = None,
    presence_penalty: Annotated[float, typer.Option(help="Subtracted once for a token in the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Subtracted per occurrence in the output.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(help="Added to the logit of a token, -100 bans it; again for more.", metavar="ID=VALUE"),
    ] = None,
    allow_token: Annotated[list[int] | None, typer.Option(help="Id of a token: no others; again for more.")] = None,
    ban_token: Annotated[list[int] | None, typer.Option(help="Id of a token: never; again for more.")] = None,
    stop_token: Annotated[list[int] | None, typer.Option(help="Id of a token that ends the output.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="How many generations, each with a seed of its own.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log probabilities at the end, on stderr, with so many alternatives.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="File with a JSON Schema for the output.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the output matches whole.")] = None,
    lark: Annotated[Path | None, typer.Option(help="File with a Lark grammar for the output.")] = None,
    lookahead: Annotated[int | None, typer.Option(help="Longest block; 0 is plain decoding.")] = None,
    acceptance: Annotated[AcceptanceName | None, typer.Option(help="Rule that keeps draft tokens.")] = None,
    proposer: Annotated[ProposerName | None, typer.Option(help="What makes the blocks.")] = None,
    prediction: Annotated[Path | None, typer.Option(help="File with the expected output, used as the draft.")] = None,
    row_format: Annotated[RowFormatName | None, typer.Option(help="What the target returns.")] = None,
    law_top: Annotated[int | None, typer.Option(help="Most tokens in a row of the draft's law.")] = None,
    max_nodes: Annotated[
        int | None, typer.Option(help="Most tokens of a block that is a tree; 0 for chains alone.")
    ] = None,
    session_id: Annotated[str, typer.Option(help="Id of the session; chosen for you without it.")] = "",
    color: Annotated[
        bool | None, typer.Option("--color/--no-color", help="Colour tokens by origin; on a terminal by default.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Statistics at the end, on stderr.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that the call may take.")] = 600.0,
    tls: Tls = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    token_file: TokenFile = "",
    plain_token: PlainToken = False,
) -> None:
    """Generate text with a running system, see `outrider up`."""
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    conditions = {"max_tokens": max_tokens, "min_tokens": min_tokens, "ignore_eos": ignore_eos}
    speculation = {
        "lookahead": lookahead,
        "acceptance": ACCEPTANCE[acceptance] if acceptance else None,
        "proposer": PROPOSERS[proposer] if proposer else None,
        "row_format": _ROW_FORMAT[row_format] if row_format else None,
        "law_top": law_top,
        "max_nodes": max_nodes,
    }

    reach = Reach(tls, tls_ca, tls_cert, tls_key, tls_server_name, token_file, plain_token)

    async def work() -> None:
        request = pb.GenerateRequest()
        set_input(request, _read(prompt), chat=chat, system=system)
        set_fields(request, {"seed": seed, "session_id": session_id, "n": n, "logprobs": logprobs})
        set_grammar(request, json_schema=json_schema, regex=regex, lark=lark)
        set_fields(request.sampling, sampling)
        set_fields(request.stop, conditions)
        request.stop.strings.extend(stop or [])
        set_fields(request.speculation, speculation)
        set_tokens(
            request, bias=logit_bias or [], allowed=allow_token or [], banned=ban_token or [], stop=stop_token or []
        )
        set_prediction(request, prediction)
        writer = TokenWriter(sys.stdout, color=_colored(color))
        await _generate(reach.to(address), request, writer, stats=stats, seconds=timeout)

    run(work())


def _read(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise Failure(f"standard input is not valid UTF-8 at byte {error.start}") from None


def _colored(wanted: bool | None) -> bool:
    return wanted if wanted is not None else sys.stdout.isatty() and "NO_COLOR" not in os.environ


async def _generate(
    connection: Connection, request: pb.GenerateRequest, writer: TokenWriter, *, stats: bool, seconds: float
) -> None:
    if legend := writer.legend():
        print(legend, file=sys.stderr)

    def first(choice: int, tokens: Iterable[pb.Token]) -> None:
        if choice == 0:
            writer.write(tokens)

    async with connection.channel as channel:
        choices = await call(channel, request, seconds=seconds, on_tokens=first, metadata=connection.metadata)
    print(flush=True)
    for number, result in enumerate(choices):
        if number:
            # The first one was streamed; the others would have run into it.
            print(f"\nchoice {number}:", file=sys.stderr)
            writer.write(result.pieces)
            print(flush=True)
        if request.HasField("logprobs"):
            print(logprob_table(result.pieces), file=sys.stderr)
        if stats:
            print(summary(result), file=sys.stderr)
