"""Commands that look at the project and at the controller."""

from rich.table import Table

from services.cli.calling import Url, ask, call_api
from services.cli.output import console, write
from services.controller.api.operations import GetQuota, GetVersion

_QUOTAS = (
    ("active runs", "active_runs", "max_active_runs"),
    ("queued runs", "queued_runs", "max_queued_runs"),
    ("GPUs", "gpus", "max_gpus"),
    ("transferqueue bytes", "transferqueue_bytes", "max_transferqueue_bytes"),
    ("checkpoint bytes", "checkpoint_bytes", "max_checkpoint_bytes"),
    ("event streams", "event_streams", "max_event_streams"),
)


def quota(url: Url = None) -> None:
    """Show what the project uses, and what it may use."""
    found = ask(url, GetQuota)
    table = Table(f"project {found.project}", "uses", "of", box=None, pad_edge=False)
    for name, used, limit in _QUOTAS:
        table.add_row(name, f"{getattr(found, used):,}", _bound(getattr(found, limit)))
    table.add_row("requests a second", "", _bound(found.max_requests_per_second))
    console.print(table, highlight=False)


def version(url: Url = None) -> None:
    """Show the release of the controller."""
    console.print(ask(url, GetVersion).version, highlight=False)


def page(url: Url = None) -> None:
    """Print a link to the run page that signs one browser in, once."""
    write(call_api(url, lambda api: api.page_link()))


def _bound(limit: int) -> str:
    return f"{limit:,}" if limit else "no bound"
