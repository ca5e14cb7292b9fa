"""demo"""

import click


def register(group: click.Group) -> None: ...
