"""Shell completion: the ``completion`` command, and the ids that options and arguments complete to."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

from sandfleet.cli.context import Cli
from sandfleet.cli.output import printable
from sandfleet.store import Store

__all__ = [
    "COMMANDS",
    "complete_jobs",
    "complete_nodes",
    "complete_ops",
    "complete_sandboxes",
    "complete_stories",
    "complete_threads",
]

#: A person waits for the key they pressed.
_WITHIN_S = 1.0
_MOST = 200
_MOST_LOOKED_AT = 2000
_VARIABLE = "_SANDFLEET_COMPLETE"

Look = Callable[[Store], Iterable[tuple[str, str]]]


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that teaches a shell to complete sandfleet's commands, options and ids.

    Threads, sandboxes, nodes and operations are asked of the fleet; one that does not answer within a second
    completes to nothing.

    \b
    Examples:
      eval "$(sandfleet completion bash)"                 in ~/.bashrc
      eval "$(sandfleet completion zsh)"                  in ~/.zshrc
      sandfleet completion fish > ~/.config/fish/completions/sandfleet.fish
    """
    found = get_completion_class(shell)
    assert found is not None  # click knows these three
    script = found(ctx.find_root().command, {}, "sandfleet", _VARIABLE)
    click.echo(script.source_template % script.source_vars())


def complete_from(look: Look) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """A completer that gives what ``look`` finds in the fleet's state: nothing after a second, and never an error."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found: list[CompletionItem] = []

        def ask() -> None:
            try:
                with _cli_of(ctx).store() as store:
                    pairs = sorted(set(look(store)))
            except Exception:  # noqa: BLE001  (there is nowhere to say it: the shell would take it for a completion)
                return
            fitting = [pair for pair in pairs if pair[0].startswith(incomplete)][:_MOST]
            found.extend(CompletionItem(value, help=printable(told)) for value, told in fitting)

        # In a thread of its own, because a Redis that is away is noticed later than a person waits.
        asking = threading.Thread(target=ask, daemon=True)
        # What loading the configuration has to remark would stand in the middle of the person's line.
        with contextlib.redirect_stderr(io.StringIO()):
            asking.start()
            asking.join(_WITHIN_S)
        return list(found)

    return complete


def _cli_of(ctx: click.Context) -> Cli:
    return ctx.ensure_object(Cli)


complete_threads = complete_from(
    lambda store: ((info.thread_id, f"{info.state} on {info.node_id}") for info in store.sandboxes())
)
complete_sandboxes = complete_from(
    lambda store: ((info.sandbox_id, f"{info.thread_id}, {info.state}") for info in store.sandboxes())
)
complete_nodes = complete_from(lambda store: ((node.node_id, f"{node.state} on {node.host}") for node in store.nodes()))
complete_jobs = complete_from(
    lambda store: ((view.op_id, view.describe) for view in store.ops(limit=_MOST_LOOKED_AT) if view.job)
)
complete_ops = complete_from(lambda store: ((view.op_id, view.describe) for view in store.ops(limit=_MOST)))


def _anything(store: Store) -> Iterable[tuple[str, str]]:
    yield from ((info.sandbox_id, f"sandbox of {info.thread_id}") for info in store.sandboxes())
    yield from ((node.node_id, "node") for node in store.nodes())
    yield from ((view.op_id, view.describe) for view in store.ops(limit=_MOST))


complete_stories = complete_from(_anything)

COMMANDS = (completion,)
