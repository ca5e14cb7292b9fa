"""The part of `tests.contract.store_machine` about background jobs and what commands write while they run."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sandfleet.store.base import Output
from tests.contract.store_compared import renamed
from tests.contract.store_fixtures import LONG_S, World
from tests.contract.store_return_rules import ReturnRules

back = st.integers(0, 2)


class JobRules(ReturnRules):
    """What a node says of commands while they run."""

    @precondition(lambda self: self.ops)
    @rule(ago=back, stranger=st.booleans())
    def started(self, ago: int, stranger: bool) -> None:
        """A job runs, or so its node believes; perhaps it says so twice."""
        op_id, identity, pair = self.ops[-1 - ago % len(self.ops)]

        def act(world: World, side: int) -> bool:
            route = renamed(pair[side], "stranger") if stranger else pair[side]
            return world.store.started(op_id, route, reply='{"ok":{"job_id":"x"}}', lasts_s=LONG_S)

        answers = self.both(act)
        assert not (stranger and answers[0])

        def again(world: World, side: int) -> tuple[str, str, Any]:
            recorded = world.record(pair[side], op_id, identity)
            # The stores write JSON with and without blanks.
            return recorded.status, recorded.state, json.loads(recorded.reply or "null")

        self.both(again)
        self.both(lambda w, _: (view := w.store.op(op_id)) and (view.job, view.reply_to))

    @precondition(lambda self: self.ops)
    @rule(ago=back, stranger=st.booleans(), another=st.booleans())
    def job_again(self, ago: int, stranger: bool, another: bool) -> None:
        """A node tells of a job that the store may have forgotten, or may know, under whatever id."""
        op_id, identity, pair = self.ops[-1 - ago % len(self.ops)]
        op_id = f"{op_id}-again" if another else op_id

        def act(world: World, side: int) -> bool:
            route = renamed(pair[side], "stranger") if stranger else pair[side]
            return world.store.job_again(op_id, route, reply='{"ok":{}}', describe="bash: x", lasts_s=LONG_S)

        answers = self.both(act)
        assert not (stranger and answers[0])
        if answers[0]:
            self.ops.append((op_id, identity, pair))
            self.told_again.add(op_id)
        self.both(lambda w, _: (view := w.store.op(op_id)) and (view.job, view.state, view.kind, view.describe))

    @precondition(lambda self: self.ops)
    @rule(ago=back, out=st.binary(max_size=3), at=st.integers(0, 4), anew=st.booleans(), keep=st.sampled_from([4, 99]))
    def writes(self, ago: int, out: bytes, at: int, anew: bool, keep: int) -> None:
        op_id = self.ops[-1 - ago % len(self.ops)][0]
        output = Output(at, 0, out)
        self.both(lambda w, _: w.store.push_output(op_id, output, keep_bytes=keep, ttl_s=LONG_S, anew=anew))
        self.both(lambda w, _: w.store.read_output(op_id, at, 0, block_s=0, reader="r"))
