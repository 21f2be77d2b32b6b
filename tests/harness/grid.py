"""A real model in float32 against transformers' `generate`: prompts, drafts of three kinds, lookaheads.

One target serves all; each kind of draft has a worker and an orchestrator of its own. tests/ holds a part of the grid,
bench/exactness_grid.py the whole.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.lm.engine import Engine
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.quiet import quiet
from outrider.lm.tokenizer import load_tokenizer
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.parity import Mismatch, first_mismatch, generate_alone
from tests.harness.workers import start_draft, start_target
from tests.harness.wrappers import OneTokenEngine

PROMPTS = (
    # Chat.
    "Why is the sky blue? Answer in a few sentences.",
    "Give me three tips for sleeping better.",
    "What is the difference between a virus and a bacterium?",
    "Tell me a short story about a lighthouse keeper.",
    "Explain to a child why the moon changes its shape.",
    # Code.
    "Write a Python function that checks whether a number is prime.",
    "Write a C function that reverses a string in place.",
    "Explain what `SELECT name FROM users WHERE age > 30;` does.",
    "Fix this code: for i in range(10) print(i)",
    "Write a bash one-liner that counts the lines of all .txt files.",
    # Many languages and scripts.
    "Quelle est la capitale de la France ? Réponds en français.",
    "¿Cómo se hace una tortilla española?",
    "Übersetze ins Englische: Der Hund schläft unter dem Tisch.",
    "日本の首都はどこですか。",
    "Привет! Расскажи, что такое осень. 🍂",
    # Lists and repetition.
    "List the planets of the solar system, one a line.",
    "Count from one to twenty in words.",
    "List ten animals in alphabetical order.",
    "Repeat the word hello ten times.",
    "Write the alphabet in upper case, letters separated by commas.",
)
LOOKAHEADS = (1, 2, 4, 8)
KINDS = ("target", "early exit", "wrong")
EARLY_EXIT_LAYERS = 20
# A token of the tokenizer that the model never says: reserved for a use that it was not trained for.
UNSAID = "<jupyter_script>"
_CONTEXT = 512


@dataclass(frozen=True)
class Case:
    """One cell of the grid: a prompt's output with a draft at a lookahead."""

    draft: str
    lookahead: int
    prompt: int
    generation: Generation
    mismatch: Mismatch | None


@dataclass
class Grid:
    """The running services, and the reference.

    Attributes:
        reference: the same model as transformers runs it.
        orchestrators: by kind of draft.
    """

    reference: PreTrainedModel
    prompts: Sequence[Sequence[int]]
    orchestrators: dict[str, RunningOrchestrator]
    _expected: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def expected(self, prompt: int, tokens: int) -> list[int]:
        """What `generate` says; computed once."""
        key = prompt, tokens
        if key not in self._expected:
            self._expected[key] = generate_alone(self.reference, self.prompts[prompt], tokens)
        return self._expected[key]

    async def run(self, draft: str, lookahead: int, prompts: Iterable[int], tokens: int) -> list[Case]:
        """All prompts at once: they share the target's passes, and the draft's."""
        chosen = list(prompts)
        orchestrator = self.orchestrators[draft]
        requests = [
            ask(self.prompts[prompt], max_tokens=tokens, lookahead=lookahead, temperature=0.0) for prompt in chosen
        ]
        calls = (orchestrator.generate(request, deadline=600.0) for request in requests)
        generations = await asyncio.gather(*calls)
        return [
            Case(draft, lookahead, prompt, one, self._mismatch(prompt, tokens, one))
            for prompt, one in zip(chosen, generations, strict=True)
        ]

    def _mismatch(self, prompt: int, tokens: int, one: Generation) -> Mismatch | None:
        return first_mismatch(self.reference, self.prompts[prompt], one.ids, self.expected(prompt, tokens))


def load_reference(weights: Path) -> PreTrainedModel:
    """The model as transformers itself loads and runs it, in float32."""
    with quiet(lambda _fraction, _what: None):
        model = AutoModelForCausalLM.from_pretrained(
            weights.parent,
            gguf_file=weights.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    return model.eval()  # type: ignore[no-any-return]


def save(weights: Path, reference: PreTrainedModel, directory: Path) -> str:
    """Model and tokenizer of the weights as a directory, which loads in a fraction of the time; returns its MODEL."""
    with quiet(lambda _fraction, _what: None):
        reference.save_pretrained(directory)
    load_tokenizer(f"gguf:{weights}").save_pretrained(directory)
    return str(directory)


def chat_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """The texts as messages of a user, by the model's chat template."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


@asynccontextmanager
async def start_grid(
    model: str,
    reference: PreTrainedModel,
    *,
    target: str = "",
    kinds: Sequence[str] = KINDS,
    dtype: str = "float32",
) -> AsyncIterator[Grid]:
    """Loads an engine for the target and for each kind of draft, and starts the services.

    Args:
        model: MODEL of drafts and tokenizer.
        reference: the model that outputs are held against.
        target: MODEL of the target; by default the same.
    """
    threads = os.cpu_count() or 1
    tokenizer = load_tokenizer(model)
    engines: list[Engine] = []

    def load(source: str, layers: int = 0) -> Engine:
        """In the thread that runs the engine: torch keeps the number of threads for each thread that uses it."""
        options = EngineOptions(dtype=dtype, context_length=_CONTEXT, layers=layers, threads=threads)
        engines.append(load_engine(source, options))
        return engines[-1]

    drafts: dict[str, Callable[[], Engine]] = {
        "target": lambda: load(model),
        "early exit": lambda: load(model, EARLY_EXIT_LAYERS),
        "wrong": lambda: OneTokenEngine(engines[0].info, int(tokenizer.convert_tokens_to_ids(UNSAID))),
    }
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(start_target(lambda: load(target or model)))
        orchestrators = {}
        for kind in kinds:
            draft = await stack.enter_async_context(start_draft(drafts[kind]))
            orchestrators[kind] = await stack.enter_async_context(
                start_orchestrator([worker.address], [draft.address], tokenizer=model, draft_timeout=60.0)
            )
        torch.set_num_threads(threads)  # for the reference, in this thread
        yield Grid(reference, chat_tokens(tokenizer), orchestrators)
