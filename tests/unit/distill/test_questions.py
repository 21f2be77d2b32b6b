"""Whole questions: many, repeatable, and those that are measured with are never learned from."""

import numpy as np
import pytest

from outrider.distill.openings import Frame, Openings
from outrider.distill.questions import is_held_out, question
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer
from tests.harness.tiny_tokenizers import byte_level


def drawn(count: int, *, held_out: bool, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [question(rng, held_out=held_out) for _ in range(count)]


def test_equal_generators_draw_equal_questions_and_seldom_one_twice() -> None:
    questions = drawn(2000, held_out=False)
    assert questions == drawn(2000, held_out=False)
    assert questions != drawn(2000, held_out=False, seed=1)
    assert len(set(questions)) > 1700
    assert all("{" not in text for text in questions)


def test_those_held_out_and_the_others_never_meet() -> None:
    learned, measured = set(drawn(2000, held_out=False)), set(drawn(200, held_out=True))
    assert not learned & measured
    assert all(map(is_held_out, measured))


@pytest.mark.parametrize("prompts", [(), tuple(f"Question {index}?" for index in range(200))])
def test_half_of_the_openings_are_whole_questions(prompts: tuple[str, ...]) -> None:
    tokenizer = byte_level()
    openings = Openings(tokenizer, len(tokenizer), prompts)
    learned = openings.draw(600, np.random.default_rng(0))
    whole = [opening.tokens for opening in learned if opening.whole]
    assert 230 < len(whole) < 370
    measured = openings.draw(600, np.random.default_rng(0), held_out=True)
    assert not {opening.tokens for opening in measured if opening.whole} & set(whole)
    if prompts:
        assert {str(tokenizer.decode(tokens)) for tokens in whole} <= set(prompts)


def test_a_template_that_puts_nothing_before_a_turn_still_begins_with_a_token() -> None:
    bare = synthetic_tokenizer(SyntheticSpec(vocab_size=26))
    assert bare.chat_template
    frame = Frame.of(bare)
    assert (frame.before, frame.after) == ((0,), ())  # it has no special token
