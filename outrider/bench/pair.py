"""The pair of models that is measured, for the ways that run it in this process."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from outrider.bench.prompts import Prompt
from outrider.cli.options import ProposerName
from outrider.cli.run import Failure
from outrider.lm.engine import ModelRefused
from outrider.lm.tokenizer import load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """Models as the services load them.

    Attributes:
        target, draft: MODELs.
        early_exit_layers: layers of the target that the early exit runs.
        early_exit: directory of a trained exit, which runs instead.
        dtype, device: empty leaves the choice to the loader, as the services do.
        threads: CPU threads; both models take turns.
        context_length: longest sequence in tokens; 0 is the model's own.
    """

    target: str
    draft: str
    early_exit_layers: int = 0
    early_exit: str = ""
    dtype: str = ""
    device: str = ""
    threads: int = 1
    context_length: int = 0

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""
        return load_tokenizer(self.target)

    def runs(self, proposer: ProposerName) -> tuple[str, int]:
        """(MODEL, its first so many layers or 0 for all) of a proposer that runs a model."""
        if proposer is not ProposerName.early_exit:
            return self.draft, 0
        return (self.early_exit, 0) if self.early_exit else (self.target, self.early_exit_layers)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """What the orchestrator makes of a prompt."""
    if not prompt.messages:
        return list(tokenizer(prompt.prompt).input_ids)
    conversation = [message.model_dump() for message in prompt.messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(str(text), add_special_tokens=False).input_ids)


class Interrupted(Exception):
    """The answer is not wanted any more."""


@dataclass
class ModelThread:
    """One thread that runs models, beside the event loop.

    Attributes:
        cancelled: set when nobody waits for the present work any more; it should end soon then.
    """

    cancelled: threading.Event = field(default_factory=threading.Event)
    _executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="bench"))

    async def run(self, work: Callable[[], T]) -> T:
        """The result of the work. Raises Failure where a model is refused."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except ModelRefused as error:
            raise Failure(str(error)) from None
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def close(self) -> None:
        """Ends the thread after its present work, which is told to end."""
        self.cancelled.set()
        self._executor.shutdown(wait=True)
