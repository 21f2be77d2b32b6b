"""The threads of a system's models, where the user did not choose them."""

from dataclasses import replace

from outrider.cli.options import ProposerName
from outrider.cli.placement import placed
from outrider.cli.split_times import Pair, Unmeasured
from outrider.cli.system import SystemOptions, available_cores, fair_threads
from outrider.cli.weights import cache_directory

_MODELS = {ProposerName.model.value, ProposerName.early_exit.value}
_WITHOUT_WEIGHTS = "synthetic:"
# Of the rounds that are measured, where the orchestrator chooses it or all rounds are plain.
_LOOKAHEAD = 4


async def with_threads(options: SystemOptions, *, measure: bool) -> tuple[SystemOptions, str]:
    """The options with both numbers of threads set, and one line about how they came about; empty when nobody asks.

    A number that was given stays, and the other is `fair_threads`. Without `measure` both are, and so they are where
    there is nothing to choose: one core, models without weights or on another device.
    """
    given = options.target_threads or options.draft_threads
    cores = available_cores()
    if given or not measure or cores == 1 or _computes_elsewhere(options):
        return _set(options, fair_threads(), fair_threads()), ""
    drafts = [name for name in options.proposers if name in _MODELS]
    if not drafts:
        return _set(options, cores, 1), f"threads: {cores} for the target, 1 for the draft, which computes little"
    try:
        split, words = await placed(_pair(options, drafts[0]), cores, cache_directory())
    except Unmeasured as error:
        return _set(options, fair_threads(), fair_threads()), f"threads: the same for both, not measured: {error}"
    return _set(options, split.target, split.draft), words


def _pair(options: SystemOptions, drafts: str) -> Pair:
    early = drafts == ProposerName.early_exit.value
    draft = options.early_exit if early and options.early_exit else options.draft
    layers = options.early_exit_layers if early else 0
    return Pair(options.target, draft, layers, options.dtype, options.lookahead or _LOOKAHEAD)


def _computes_elsewhere(options: SystemOptions) -> bool:
    models = options.target, options.draft
    return options.device not in ("", "cpu") or any(model.startswith(_WITHOUT_WEIGHTS) for model in models)


def _set(options: SystemOptions, target: int, draft: int) -> SystemOptions:
    return replace(
        options, target_threads=options.target_threads or target, draft_threads=options.draft_threads or draft
    )
