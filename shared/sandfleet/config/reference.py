"""``docs/configuration.md``, generated from the table of settings: ``python -m sandfleet.config.reference``."""

from __future__ import annotations

import sys

from sandfleet.config.keys import SECTIONS, Leaf, leaf_by_name, leaves
from sandfleet.config.mounts import LOCAL_OWN, LOCAL_SYSTEM, RESERVED_PREFIXES
from sandfleet.config.seeds import ALIASES, CLASSES, FOREIGN_SECTIONS, KINDS, NO_EFFECT, TOOLS_LIST
from sandfleet.config.showing import about, default_text

__all__ = ["page"]

_HEAD = """\
# Configuration

Generated from the table of settings by `make docs`. `sandfleet config show` tells what is in force on a machine and
where each value comes from, `sandfleet config check` reads a file as a process would, `sandfleet config init` writes
one that has every key commented out.

## Where settings come from

The first that says something wins:

1. arguments: `SandboxProvider(replicas=4)`, `sandfleet worker --replicas 4`;
2. environment variables `SANDFLEET_…`, then `REDIS_URL` for the URL of Redis. Lists are `a,b`, mappings
   `key=value,key=value`, and both may be JSON;
3. the file's profile that `SANDFLEET_ENV` names;
4. the file;
5. the defaults below.

**The file** is the one that `--config FILE` or `SANDFLEET_CONFIG` names, else `./sandfleet.yaml`, else
`~/.config/sandfleet/config.yaml` (`$XDG_CONFIG_HOME`), else there is none. A file that was found, not named, must
belong to you or to root and not be writable by everybody. `SANDFLEET_CONFIG=/dev/null` means no file. One file serves
clients, schedulers and nodes; each takes what concerns it. `sandfleet up` hands its settings on to what it starts; a
command in another terminal and an agent find its Redis, but deadlines, `environment`, `overflow_policy` and the
limits of
tools belong to who asks: give them the same file.

**Errors** name the file, the line, the key and the nearest valid one: an unknown key, a wrong value, a key given
twice
or under two names, an empty file, a directory, a file that is not UTF-8 or not YAML. They are `ConfigError`
(code `config_invalid`), and exit code 2 of the command line.

**Sizes** may be written `512m` or `1.5GiB`. **Paths** on this machine are relative to the file; `~` is your home.
**Empty values** (`image:`) are as good as absent; in a profile they take the file's value back to the default.

## Variables: `$NAME`

A value that is a whole `$NAME` or `${NAME}` is taken from the environment. A variable that is not set is an error
that
names key and variable, except below `environment:`: there the value is empty and a warning says so, because nodes and
schedulers read the same file and need not hold the secrets of its clients. `$$` at the beginning stands for a plain
`$`; elsewhere in a value `$` is nothing special. `env_inherit` copies variables by name into `environment`, where
what
stands there explicitly wins; `env_whitelist` and `env_blacklist` restrict what it may copy. Values of
`environment` are
never shown or logged; Redis holds them for as long as the sandbox lives. A sandbox has the `environment` with
which it was
made: a change reaches a thread with its next sandbox.

## Profiles

```yaml
sandbox:
  replicas: 16
profiles:
  dev:
    sandbox:
      backend: mock
  production:
    sandbox:
      replicas: 64
```

`SANDFLEET_ENV=production` lays that profile over the rest: mappings are merged, lists and single values replaced. An
unknown name is an error that lists those there are. Profiles that are not chosen are checked too.

## Mounts

```yaml
sandbox:
  mounts:
    - host_path: /srv/projects
      container_path: /mnt/projects
      read_only: true
```

`host_path` is absolute and must be a directory on the node when it starts; a missing one is an error that names the
mount. Under a worker that runs as root, local sandboxes have uids of their own: what they are to write to must be
writable by others, whatever `read_only` says. `container_path` is absolute and plain. It may not be, lie in or
hide {reserved} or `skills.container_path`, nor
be `/workspace`, nor be given twice. Nodes with `local` or `host` sandboxes also refuse paths in {system}, and the
directories {own} themselves; `sandfleet config check` tells. A mount may lie in another one where that has a
directory.

## Settings
"""

_DIFFERENCES = """\
## Defaults that differ from the systems before

| setting | here | there | why |
|---|---|---|---|
| `sandbox.replicas` | 16 per node, never exceeded | DeerFlow: 3, a soft limit | A node is a machine, not a process \
beside the agent; places are counted in Redis, so a limit holds under races. |
| `sandbox.active_idle_timeout_s` | 3600 | DeerFlow: `idle_timeout`, 600 | What a thread still holds is ended later \
than what it gave back; both can be set. |
| `sandbox.overflow_policy` | for every backend | DeerFlow: for E2B only | Same default, `wait`. |
| `client.agent_ttl_s` | 60 | DeerFlow: 30 s × 4 | How long a client that died keeps its sandboxes from others; \
`ownership.renewal_interval_seconds` × `ttl_multiplier` sets it. |
| `sandbox.container_prefix` | `sandfleet` | DeerFlow: `deer-flow-sandbox` | Two systems on one Docker must not take \
each other's containers for orphans. |
| `sandbox.image` | the backend's own | DeerFlow: `all-in-one-sandbox:latest` | A moving tag of a foreign registry is \
no default. |
| `sandbox.network_mode` | `none` | open | A sandbox that needs the network says so. |
| `sandbox.memory_bytes`, `cpus`, `pids` | 1 GiB, 1, 256 | DeerFlow's containers: none; Volcengine: 4096 MB, 2 | A \
sandbox must not take its machine down. |
| `sandbox.command_timeout_s` | 600 | AgentSDK: 120 (local), 60 (Aliyun) | DeerFlow's value; each call may name its \
own. |
| `skills.path` | none | DeerFlow: `skills/` of the project | A node is not started in a project. |
| `read_before_write.enabled` | false | on in DeerFlow's example file | An agent that writes without reading works \
as before; switch the gate on when yours reads first. |

Mounts at reserved or missing paths are errors here, where DeerFlow warns and leaves them out. `$NAME` without a value
is an error as there, but for `environment`. `acquire_timeout`, `idle_timeout`, `bash_command_timeout` and the
limits of
output keep DeerFlow's defaults.
"""


_READ_AS_THEY_ARE = """\
A `config.yaml` of DeerFlow, and AgentSDK's configuration written as YAML, load as they are. What was understood in \
another way than it may have been meant is logged once, and listed by `sandfleet config check`.
"""
_CLASS_PATHS = """\
`sandbox.use` of DeerFlow names a class. Those of DeerFlow itself, under `deerflow…` or `src…`, stand for a
backend; a \
`backend:` beside it wins. Any other `package.module:Class` is imported by `get_sandbox_provider()` and must derive \
from `sandfleet.SandboxProvider`; further keys below `sandbox:` are then left to it. A non-empty `provisioner_url` \
turns `aio` into `kubernetes`.
"""


def page() -> str:
    """The whole page."""
    head = _HEAD
    for name, paths in (("{reserved}", RESERVED_PREFIXES), ("{system}", LOCAL_SYSTEM), ("{own}", LOCAL_OWN)):
        head = head.replace(name, ", ".join(f"`{path}`" for path in paths))
    parts = [head]
    parts += [_section(name, told) for name, told in _sections()]
    parts += [_elsewhere(), _understood(), _DIFFERENCES]
    return "\n".join(parts)


def _sections() -> list[tuple[str, str]]:
    present = dict.fromkeys(leaf.key.partition(".")[0] for leaf in leaves())
    return [(name, SECTIONS.get(name, "")) for name in present]


def _section(name: str, told: str) -> str:
    members = [leaf for leaf in leaves() if leaf.key.partition(".")[0] == name]
    tables = [f"### `{name}:`\n", f"{told}\n" if told else "", _table([m for m in members if m.used_by is None])]
    for used_by in dict.fromkeys(leaf.used_by for leaf in members if leaf.used_by is not None):
        group = [leaf for leaf in members if leaf.used_by == used_by]
        tables += [f"{about(group[0])} Still below `{name}:`.\n", _table(group)]
    return "\n".join(part for part in tables if part)


def _table(members: list[Leaf]) -> str:
    if not members:
        return ""
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for leaf in members:
        default = default_text(leaf)
        empty = default in ("''", "[]", "{}", "null")
        told = f"{leaf.info.description} `{leaf.env}`"
        rows.append(f"| `{leaf.key}` | {leaf.type_text} | {'–' if empty else f'`{default}`'} | {_cell(told)} |")
    return "\n".join([*rows, ""])


def _elsewhere() -> str:
    rows = [
        "### Variables only\n",
        "| variable | |",
        "|---|---|",
        "| `SANDFLEET_CONFIG` | The configuration file. |",
        "| `SANDFLEET_ENV` | The profile in it. |",
        "| `SANDFLEET_LOG_FORMAT` | `json` writes logs as JSON, one object a line. |",
        "",
    ]
    return "\n".join(rows)


def _understood() -> str:
    """How a file of another system is read."""
    parts = [
        "## Files of other systems\n",
        _READ_AS_THEY_ARE,
        "### Class paths and kinds\n",
        _CLASS_PATHS,
        "| there | here |",
        "|---|---|",
        *(f"| `use: …:{name}` | `backend: {backend}` |" for name, backend in CLASSES.items()),
        *(f"| `kind: {kind}` | `backend: {backend}` |" for kind, backend in KINDS.items()),
        "| `kind: local` with `config.use_docker: true` | `backend: docker` |",
        "",
        "### Other names\n",
        "| there | here | |",
        "|---|---|---|",
        *_alias_rows(),
        "",
        "### Without effect\n",
        "| key | why |",
        "|---|---|",
        *(f"| `{key}` | {_cell(why)} |" for key, (_, why) in NO_EFFECT.items()),
        f"| `tools:` as a list | {_cell(TOOLS_LIST)} |",
        "| `sandbox.ownership.type` | who owns a sandbox is always kept in Redis, by its node |",
        "",
        "Sections that do not concern sandboxes are passed over: "
        + ", ".join(f"`{name}`" for name in sorted(FOREIGN_SECTIONS))
        + ". In a file that has one of them, further unknown sections are passed over too.\n",
    ]
    return "\n".join(parts)


def _alias_rows() -> list[str]:
    rows = [f"| `{key}` | `{leaf_by_name()[alias.name].key}` | {_cell(alias.told)} |" for key, alias in ALIASES.items()]
    return [
        *rows,
        "| `sandbox.config.volumes` | `sandbox.mounts` | `source`, `target`, `readonly` |",
        "| `sandbox.ownership.redis_url` | `redis.url` | |",
        "| `sandbox.ownership.key_prefix` | `redis.prefix` | a colon is added at its end |",
        "| `sandbox.ownership.renewal_interval_seconds`, `ttl_multiplier` | `client.agent_ttl_s` | their product |",
        "| `tools: [{name: glob, max_results: …}]` | `tools.glob.max_results` | `grep` likewise |",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
