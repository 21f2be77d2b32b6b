from outrider.cli.client import Generation
from outrider.cli.demo_prompts import PROMPTS
from outrider.cli.demo_runs import DemoRuns, Plan, caption
from outrider.cli.stats import RunStats
from outrider.cli.system import SystemOptions

OPTIONS = SystemOptions("t", "d", dtype="bfloat16", target_threads=1, draft_threads=1)


def gave(speculative: list[int], plain: list[int]) -> DemoRuns:
    def generation(tokens: list[int]) -> Generation:
        return Generation(tokens=tokens, stats=RunStats(tokens=len(tokens), seconds=1.0))

    return DemoRuns(PROMPTS[0], 2, [generation(speculative)], [generation(plain)])


def test_a_difference_is_told_with_its_reason() -> None:
    same, other = gave([1, 2, 3], [1, 2, 3]), gave([1, 2, 3], [1, 5, 3])
    assert (same.verdict(), other.verdict()) == ("chat identical", "chat differs from token 2 on")
    text = caption([same, other], Plan(96, None, 2), OPTIONS)
    assert "bfloat16, 1 thread for each model, at most 96 tokens, 2 times each way" in text
    assert "with --dtype float32 the tokens are the same" in text
    assert "--dtype float32" not in caption([same], Plan(96, None, 2), OPTIONS)


def test_different_threads_are_told_apart() -> None:
    options = SystemOptions("t", "d", dtype="float32", target_threads=2, draft_threads=1)
    assert "float32, 2 threads for the target, 1 for the draft" in caption([gave([1], [1])], Plan(1, None, 1), options)


def test_comparison_carries_the_prompts_draft() -> None:
    comparison = gave([1, 2], [1]).comparison()
    assert (comparison.kind, comparison.draft, comparison.lookahead) == ("chat", PROMPTS[0].proposer.value, 2)
    assert (comparison.speculative.tokens, comparison.plain.tokens) == (2, 1)
