import io

from outrider.cli.tokens import STYLES, TokenWriter
from outrider.v1 import orchestrator_pb2 as pb

TOKENS = [
    pb.Token(text="Once", origin=pb.TOKEN_ORIGIN_PLAIN),
    pb.Token(text=" upon", origin=pb.TOKEN_ORIGIN_ACCEPTED),
    pb.Token(text="", origin=pb.TOKEN_ORIGIN_ACCEPTED),
    pb.Token(text=" a\n", origin=pb.TOKEN_ORIGIN_RECOVERED),
    pb.Token(text="\ttime", origin=pb.TOKEN_ORIGIN_BONUS),
]


def written(tokens: list[pb.Token], *, color: bool) -> str:
    stream = io.StringIO()
    TokenWriter(stream, color=color).write(tokens)
    return stream.getvalue()


def test_without_color_the_text_is_exact() -> None:
    text = "bell \x07, escape \x1b[2J, tab \t"
    assert written(TOKENS, color=False) == "Once upon a\n\ttime"
    assert written([pb.Token(text=text)], color=False) == text


def test_every_origin_has_a_color_of_its_own() -> None:
    assert written(TOKENS, color=True) == "Once\x1b[32m upon\x1b[0m\x1b[31m a\n\x1b[0m\x1b[36m\ttime\x1b[0m"
    named = {value for name, value in pb.TokenOrigin.items() if not name.endswith("UNSPECIFIED")}
    assert set(STYLES) == named
    assert len({str(style) for _, style in STYLES.values()}) == len(named)


def test_origin_of_a_newer_service_is_shown_plainly() -> None:
    token = pb.Token(text="x")
    token.MergeFromString(bytes([0x18, 99]))  # origin = 99
    assert written([token], color=True) == "x"


def test_model_output_cannot_drive_the_terminal() -> None:
    shown = written([pb.Token(text="a\x1b]0;title\x07\r\x9bJ b\n\t", origin=pb.TOKEN_ORIGIN_PLAIN)], color=True)
    assert shown == "a�]0;title���J b\n\t"


def test_legend_names_the_origins_in_their_colors() -> None:
    writer = TokenWriter(io.StringIO(), color=True)
    assert writer.legend() == "\x1b[32maccepted\x1b[0m  \x1b[31mrecovered\x1b[0m  \x1b[36mbonus\x1b[0m  plain"
    assert TokenWriter(io.StringIO(), color=False).legend() == ""


def test_explanation_has_a_line_for_each_origin() -> None:
    lines = TokenWriter(io.StringIO(), color=True).explanation().splitlines()
    usual = [name for origin, (name, _) in STYLES.items() if origin != pb.TOKEN_ORIGIN_REPLAYED]
    assert [name in line for name, line in zip(usual, lines, strict=True)] == [True] * len(usual)
    assert TokenWriter(io.StringIO(), color=False).explanation() == ""
