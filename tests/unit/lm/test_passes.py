"""Planning of passes, and room in the KV cache."""

import pytest
import torch

from outrider.lm.passes import PassRunner, Work, plan
from outrider.lm.session_cache import Session, SessionCache
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.workers import int32


def work(number: int, tokens: int, rows: int = 1) -> Work:
    session: Session[str] = Session(str(number))
    session.extend(int32([number] * tokens))
    return Work(session, tokens, tokens - rows, number)


def planned(works: list[Work], budget: int, short: int = 4) -> list[tuple[int, int]]:
    return [(piece.work.number, piece.positions) for piece in plan(works, budget, short)]


def test_decode_goes_before_prompts_and_prompts_get_the_rest() -> None:
    assert planned([work(0, 100), work(1, 2), work(2, 3), work(3, 50)], 20) == [(1, 2), (2, 3), (0, 15)]


def test_order_of_arrival_decides_within_a_class() -> None:
    assert planned([work(2, 2), work(0, 9), work(1, 2), work(3, 9)], 30) == [(1, 2), (2, 2), (0, 9), (3, 9)]


def test_a_quarter_is_kept_for_prompts_while_decoding_fills_the_budget() -> None:
    decodes = [work(number, 4) for number in range(10)]
    assert planned([*decodes, work(10, 100)], 16) == [(0, 4), (1, 4), (2, 4), (10, 4)]
    assert planned(decodes, 16) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_decode_work_is_never_cut_behind_another() -> None:
    assert planned([work(0, 3), work(1, 3)], 5) == [(0, 3)]
    assert planned([work(0, 3)], 2) == [(0, 2)]


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_the_smallest_budgets_make_progress(budget: int) -> None:
    pieces = planned([work(0, 100), work(1, 2)], budget)
    assert pieces
    assert sum(positions for _, positions in pieces) <= budget


def runner(pages: int, budget: int = 64) -> tuple[PassRunner, ScriptedEngine, SessionCache[str], set[str]]:
    busy: set[str] = set()
    engine = ScriptedEngine(next_token_script(16), pages=pages, page_size=4)
    cache: SessionCache[str] = SessionCache(60.0, busy.__contains__, lambda key: None)
    return PassRunner(engine, cache, budget=budget, short=4), engine, cache, busy


def opened(cache: SessionCache[str], busy: set[str], number: int, tokens: int, rows: int = 1) -> Work:
    session = cache.open(str(number))
    session.extend(int32([number] * tokens))
    busy.add(session.key)
    return Work(session, tokens, tokens - rows, number)


def test_rows_of_a_work_in_pieces_come_in_order() -> None:
    passes, engine, cache, busy = runner(pages=100, budget=3)
    session = cache.open("s")
    session.extend(int32([1, 2, 3, 4, 5, 6, 7]))
    busy.add("s")
    one = Work(session, 7, 3, 0)
    while one.remaining:
        assert passes.run([one]) is None
    assert [len(rows) for rows in one.rows] == [3, 1]
    assert [rows.argmax(1).tolist() for rows in one.rows] == [[5, 6, 7], [8]]
    assert (one.passes, one.computed, one.batch_items) == (3, 7, 1)
    assert [(seen.tokens, seen.rows) for (seen,) in engine.passes] == [(3, 0), (3, 3), (1, 1)]


def test_without_idle_sessions_the_youngest_waits_and_then_gives_way() -> None:
    passes, _, cache, busy = runner(pages=6, budget=12)
    works = [opened(cache, busy, number, 20) for number in range(2)]
    finished: list[int] = []
    for _ in range(20):
        assert passes.run(works) is None
        for done in [one for one in works if not one.remaining]:
            assert done.rows[-1].argmax().item() == done.number + 1
            assert sum(len(rows) for rows in done.rows) == 1
            finished.append(done.number)
            works.remove(done)
            busy.discard(str(done.number))
        if not works:
            break
    assert finished == [0, 1]


def test_a_displaced_work_begins_anew_with_the_right_rows() -> None:
    passes, _, cache, busy = runner(pages=4, budget=8)
    young = opened(cache, busy, 1, 14, rows=9)
    assert passes.run([young]) is None
    assert (young.session.cached, sum(len(rows) for rows in young.rows)) == (8, 3)
    old = opened(cache, busy, 0, 15)
    while old.remaining:
        assert passes.run([old, young]) is None
    assert young.session.cached == 0
    busy.discard("0")
    while young.remaining:
        assert passes.run([young]) is None
    assert torch.cat(young.rows).argmax(1).tolist() == [2] * 9


def test_what_cannot_fit_alone_is_handed_back() -> None:
    passes, _, cache, busy = runner(pages=2)
    huge = opened(cache, busy, 0, 20)
    assert passes.run([huge]) is huge
