"""The command."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.access import PlainToken, Reach, Tls, TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile
from outrider.cli.doctor.examine import Settings, WorkerTls, examine
from outrider.cli.doctor.findings import Finding
from outrider.cli.doctor.network import sources
from outrider.cli.doctor.report import as_json, healthy, show, summary
from outrider.cli.doctor.store import StoreSettings
from outrider.cli.options import DEFAULT_ADDRESS
from outrider.cli.run import Failure, run
from outrider.net.address import parse_addresses, without_credentials

_ADDRESSES, _FILE = "HOST:PORT,...", "FILE"
_NEVER_FOLDED = 10_000

Orchestrator = Annotated[
    str,
    typer.Option(
        envvar="OUTRIDER_ADDRESS", help="Orchestrators, HOST:PORT or dns:NAME:PORT, by commas.", metavar=_ADDRESSES
    ),
]
Targets = Annotated[
    str, typer.Option(help="Target workers, if others than orchestrators name are to be looked at.", metavar=_ADDRESSES)
]
Drafts = Annotated[str, typer.Option(help="Draft workers, likewise.", metavar=_ADDRESSES)]
Metrics = Annotated[str, typer.Option(help="Metrics endpoints (--metrics-address).", metavar=_ADDRESSES)]
Store = Annotated[str, typer.Option(envvar="OUTRIDER_STORE", help="The orchestrators' --store.", metavar="URL")]
StorePasswordFile = Annotated[
    str, typer.Option(envvar="OUTRIDER_STORE_PASSWORD_FILE", help="File with its password.", metavar=_FILE)
]
StoreWaitReplicas = Annotated[
    int, typer.Option(envvar="OUTRIDER_STORE_WAIT_REPLICAS", min=0, help="The orchestrators' --store-wait-replicas.")
]
WorkerTlsCa = Annotated[
    str, typer.Option(envvar="OUTRIDER_WORKER_TLS_CA", help="PEM file with the workers' CA.", metavar=_FILE)
]
WorkerTlsCert = Annotated[
    str, typer.Option(envvar="OUTRIDER_WORKER_TLS_CERT", help="Certificate to show to workers.", metavar=_FILE)
]
WorkerTlsKey = Annotated[
    str, typer.Option(envvar="OUTRIDER_WORKER_TLS_KEY", help="PEM file with its key.", metavar=_FILE)
]
TargetTlsName = Annotated[
    str, typer.Option(envvar="OUTRIDER_TARGET_TLS_NAME", help="Name in the targets' certificates.", metavar="NAME")
]
DraftTlsName = Annotated[
    str, typer.Option(envvar="OUTRIDER_DRAFT_TLS_NAME", help="Name in the drafts' certificates.", metavar="NAME")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that a check may take.")]
RoundTimeout = Annotated[float, typer.Option(min=0.1, help="Seconds that a check may take that generates.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Strict = Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")]


def doctor(
    orchestrator: Orchestrator = DEFAULT_ADDRESS,
    targets: Targets = "",
    drafts: Drafts = "",
    store: Store = "",
    store_password_file: StorePasswordFile = "",
    store_wait_replicas: StoreWaitReplicas = 0,
    metrics: Metrics = "",
    tls: Tls = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    token_file: TokenFile = "",
    plain_token: PlainToken = False,
    worker_tls_ca: WorkerTlsCa = "",
    worker_tls_cert: WorkerTlsCert = "",
    worker_tls_key: WorkerTlsKey = "",
    target_tls_name: TargetTlsName = "",
    draft_tls_name: DraftTlsName = "",
    timeout: Timeout = 5.0,
    round_timeout: RoundTimeout = 60.0,
    json: AsJson = False,
    strict: Strict = False,
) -> None:
    """Check a running installation, and say what to put right. Ends with 1 when something is broken."""
    try:
        if store:
            without_credentials(store)
        settings = Settings(
            sources(orchestrator),
            sources(targets),
            sources(drafts),
            parse_addresses(metrics),
            StoreSettings(store, store_password_file, store_wait_replicas),
            Reach(tls, tls_ca, tls_cert, tls_key, tls_server_name, token_file, plain_token),
            WorkerTls(worker_tls_ca, worker_tls_cert, worker_tls_key, target_tls_name, draft_tls_name),
            timeout,
            round_timeout,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found: list[Finding] = []
    run(_doctor(settings, found, quiet=json))
    well = healthy(found, strict=strict)
    if json:
        print(as_json(found, healthy=well))
    else:
        print(summary(found))
    sys.exit(0 if well else 1)


async def _doctor(settings: Settings, found: list[Finding], *, quiet: bool) -> None:
    if not settings.orchestrators:
        raise Failure("--orchestrator names none")
    console = Console() if sys.stdout.isatty() else Console(width=_NEVER_FOLDED)
    async for findings in examine(settings):
        found += findings
        if not quiet:
            show(console, findings)
