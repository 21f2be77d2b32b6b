"""Whether the parts of an installation go together: versions, models, vocabularies, contexts."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import grpc

from outrider import __version__
from outrider.cli.doctor.findings import Finding, broken, ok, warning
from outrider.cli.doctor.network import Endpoint
from outrider.cli.doctor.services import Worker, get_info
from outrider.law.params import LAW_VERSION
from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoResponse

Orchestrators = Sequence[tuple[Endpoint, OrchestratorServiceGetInfoResponse]]
_ALL = "all"


async def agreement(orchestrators: Orchestrators, workers: Sequence[Worker]) -> list[Finding]:
    """All comparisons; those that have nothing to compare are left out."""
    found = _versions(orchestrators, workers) + _laws(workers) + await _vocabularies(workers)
    for kind in ("target", "draft"):
        same = [each for each in workers if each.kind == kind]
        found += _alike(f"{kind}s", [(each.name, _model(each)) for each in same], _SAME_MODEL)
    settings = [(endpoint.name, _settings(info)) for endpoint, info in orchestrators]
    found += _alike("orchestrators", settings, "give all orchestrators of a store the same flags")
    return found + _contexts(workers) + _proposers(workers)


_SAME_MODEL = "give all workers of a pool the same model, dtype and context: a session may move to any of them"


def _model(worker: Worker) -> str:
    model = worker.model
    return f"{model.model_id} in {model.dtype} with a context of {model.context_length}"


def _settings(info: OrchestratorServiceGetInfoResponse) -> str:
    default = info.default_lookahead if info.HasField("default_lookahead") else "auto"
    return f"lookahead {default}, at most {info.max_lookahead}"


def _versions(orchestrators: Orchestrators, workers: Iterable[Worker]) -> list[Finding]:
    told = [(endpoint.name, info.version) for endpoint, info in orchestrators]
    told += [(each.name, each.version) for each in workers if each.version]
    if not told:
        return []
    versions = _grouped(told)
    if list(versions) == [__version__]:
        return [ok("versions", _ALL, f"Outrider {__version__} in all {len(told)} processes asked, and here")]
    seen = f"{_listed(versions)}; here {__version__}"
    return [warning("versions", _ALL, seen, "finish the upgrade (docs/operations.md says in which order)")]


def _laws(workers: Iterable[Worker]) -> list[Finding]:
    laws = _grouped((each.name, str(each.model.law_version)) for each in workers)
    if not laws:
        return []
    if list(laws) == [str(LAW_VERSION)]:
        return [ok("law", _ALL, f"version {LAW_VERSION} everywhere")]
    advice = "workers of another law version are not used: bring all processes to one version"
    return [broken("law", _ALL, f"versions differ: {_listed(laws)}; here {LAW_VERSION}", advice)]


async def _vocabularies(workers: Sequence[Worker]) -> list[Finding]:
    targets = [each for each in workers if each.kind == "target"]
    if not workers:
        return []
    reference = (targets or workers)[0]
    strangers = [each for each in workers if _vocabulary(each) != _vocabulary(reference)]
    found = [
        broken(
            "vocabulary",
            each.name,
            f"it has another vocabulary than {reference.name}{await _difference(reference, each)} "
            f"({each.model.vocab_size} tokens, not {reference.model.vocab_size})",
            "serve models of one tokenizer (and give the orchestrator that one): this one is not used",
        )
        for each in strangers
    ]
    if not found:
        model = reference.model
        seen = f"{model.vocab_size} tokens, fingerprint {model.vocab_fingerprint[:12]}, the same everywhere"
        found.append(ok("vocabulary", _ALL, f"{seen}; {_padded(workers)}"))
    found += [
        broken(
            "vocabulary",
            each.name,
            f"{each.model.vocab_size} tokens in a head of {each.model.padded_vocab_size}",
            "its model is damaged",
        )
        for each in workers
        if each.model.padded_vocab_size < each.model.vocab_size
    ]
    return found


def _padded(workers: Iterable[Worker]) -> str:
    pads = _grouped((each.kind, str(each.model.padded_vocab_size)) for each in workers)
    return "padded to " + ", ".join(f"{size} ({'s, '.join(dict.fromkeys(kinds))}s)" for size, kinds in pads.items())


def _vocabulary(worker: Worker) -> tuple[str, int]:
    return worker.model.vocab_fingerprint, worker.model.vocab_size


async def _difference(one: Worker, other: Worker) -> str:
    """Where two vocabularies part; empty when one of them cannot be asked from here."""
    hashes = []
    for each in (one, other):
        if each.endpoint is None:
            return ""
        try:
            async with connect(each.endpoint.address, each.endpoint.tls) as channel:
                hashes.append((await get_info(each.endpoint, channel, hashes=True)).model.token_hashes)
        except grpc.aio.AioRpcError:
            return ""  # it answered a moment ago, and is looked at elsewhere
        if len(hashes[-1]) % 4:
            return f"; {each.name} has token hashes of {len(hashes[-1])} bytes, which none can have"
    # It brings transformers along, seconds of import that nobody else here needs.
    from outrider.lm.tokenizer import first_difference

    differing = first_difference(*hashes)
    return ", in the texts of tokens" if differing is None else f", first at token id {differing}"


def _contexts(workers: Sequence[Worker]) -> list[Finding]:
    shortest = {
        kind: min(each.model.context_length for each in workers if each.kind == kind)
        for kind in dict.fromkeys(each.kind for each in workers)
    }
    if len(shortest) < 2:
        return []
    seen = ", ".join(f"{kind}s {tokens} tokens" for kind, tokens in shortest.items())
    if shortest["draft"] < shortest["target"]:
        advice = "longer sequences run without drafts: give the drafts the targets' --context-length if they can"
        return [warning("context", _ALL, seen, advice)]
    return [ok("context", _ALL, seen)]


def _proposers(workers: Iterable[Worker]) -> list[Finding]:
    offers = [(each.name, ", ".join(each.proposers) + _kept(each)) for each in workers if each.proposers]
    if len(_grouped(offers)) == 1:
        return [ok("proposers", "drafts", offers[0][1])]
    return _alike("drafts", offers, "a session gets what its draft worker offers: give all the same --proposers")


def _kept(worker: Worker) -> str:
    tokens = worker.history_tokens
    return f"; keeps {tokens} tokens of each tenant's outputs in memory" if tokens else ""


def _alike(whose: str, told: Sequence[tuple[str, str]], advice: str) -> list[Finding]:
    """That all say the same; nothing about fewer than two."""
    if len(told) < 2:
        return []
    groups = _grouped(told)
    if len(groups) == 1:
        return [ok("alike", whose, f"{len(told)} times {told[0][1]}")]
    return [warning("alike", whose, f"they differ: {_listed(groups)}", advice)]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by what they said."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, said in pairs:
        groups[said].append(name)
    return dict(groups)


def _listed(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{said}: {', '.join(names[:8])}" for said, names in groups.items())
