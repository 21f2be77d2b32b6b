"""Drafts of one target side by side, on the texts that `outrider distill` held out.

    python -m bench.held_out --target MODEL --work DIR DRAFT... [--lookahead N] [--texts N] [--kept N] [--threads N]

DRAFT is a directory that `outrider distill` wrote: a draft of layers or an EAGLE head. DIR is a --work of it, whose
held-out texts all are measured with, by the code of their own reports: greedy blocks, drafted as serving drafts them
(later places of an EAGLE head on its own states). Tokens that a draft does not know count as wrong. An EAGLE head of
kind 1 says one of the `--kept` tokens that are most frequent in DIR's other texts; served, it knows all.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from outrider.cli.run import Failure, told
from outrider.distill.acceptance import Acceptance, measure
from outrider.distill.batches import Batcher
from outrider.distill.corpus import HELD_OUT
from outrider.distill.shard import load_shard
from outrider.distill.states import States
from outrider.distill.students import Begun, Making, eagle_of, kept_of, student_of
from outrider.lm.checkpoint import load_config
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import ModelRefused
from outrider.lm.load import vocabulary_of_source
from outrider.lm.source import DRAFT_FILE, ModelSource, parse_source

CPU = torch.device("cpu")


def measured(draft: Path, target: ModelSource, options: argparse.Namespace) -> Acceptance:
    """Raises ModelRefused when the directory holds no draft of this target."""
    config = load_config(target)
    vocabulary = vocabulary_of_source(target, "", config)
    kind = 0 if (draft / DRAFT_FILE).exists() else EagleWeights.load(draft).config.kind
    begun = Begun.load(draft, vocabulary.fingerprint, eagle=kind)
    making = Making(0, 0, 0, kind, own_head=True, positions=1, lookahead=options.lookahead)
    corpus: Path = options.work / "corpus"
    others = [path for path in sorted(corpus.iterdir()) if path.is_dir() and path.name != HELD_OUT]
    learned = [text for path in others for text in load_shard(path)]
    texts = load_shard(corpus / HELD_OUT)
    if eagle := eagle_of(making, target, begun):
        fed = eagle.layers_of(config.get_text_config(decoder=True).num_hidden_layers)
        texts = States(options.work / "states", target, fed, CPU, lambda _done, _all: None).of(HELD_OUT, texts)
    kept = kept_of(begun, learned, vocabulary.size, options.kept)
    student = student_of(making, target, kept, begun, CPU)
    batcher = Batcher(kept, vocabulary.size, CPU)
    return measure(student, batcher, texts[: options.texts], options.report_tokens, options.lookahead)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="+", type=Path, metavar="DRAFT")
    parser.add_argument("--target", required=True, metavar="MODEL")
    parser.add_argument("--work", required=True, type=Path, metavar="DIR")
    parser.add_argument("--lookahead", type=int, default=4, metavar="N")
    parser.add_argument("--texts", type=int, default=128, metavar="N", help="held-out ones (128)")
    parser.add_argument("--report-tokens", type=int, default=128, metavar="N", help="of each answer (128)")
    parser.add_argument("--kept", type=int, default=8192, metavar="N", help="tokens of a head of kind 1 (8192)")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table()
    for title in ("draft", "tokens a pass", "by position", "when sampling"):
        table.add_column(title, justify="left" if title == "draft" else "right", overflow="fold")
    with told():
        for draft in options.drafts:
            try:
                found = measured(draft, parse_source(options.target), options)
            except ModelRefused as error:
                raise Failure(str(error)) from error
            rates = ", ".join(f"{rate:.0%}" for rate in found.by_position)
            table.add_row(draft.resolve().name, f"{found.tokens_per_pass:.3f}", rates, f"{found.overlap:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
