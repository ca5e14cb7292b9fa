"""The settings of a process: where Redis is, where data lies, how much a node holds.

They come from keyword arguments, ``SANDFLEET_…`` environment variables, one YAML file and defaults, in that order.

========== ===========================================================================
settings   `Settings`: fields, types, bounds, defaults
models     its groups: mounts, containers, clouds, guards
mounts     which mounts are allowed, and whether they are there
keys       the one table: each setting's key in the file and its environment variable
document   finding and reading the file
found      values with their places, and notices
seeds      DeerFlow's and AgentSDK's spellings
layers     what one layer (the file, a profile) says
loading    all sources together
environ    settings as environment variables, and back
urls       what is wrong with a URL, and how it may be shown
showing    settings for people, secrets hidden; the file that ``config init`` writes
reference  docs/configuration.md
========== ===========================================================================
"""

from sandfleet.config.loading import Loaded, load_settings
from sandfleet.config.mounts import check_mounts, check_mounts_exist
from sandfleet.config.settings import INLINE_BYTES, Mount, Settings

__all__ = ["INLINE_BYTES", "Loaded", "Mount", "Settings", "check_mounts", "check_mounts_exist", "load_settings"]
