"""The part of `tests.contract.store_machine` about operations that outlive their node."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sandfleet.ids import Identity
from sandfleet.model import NodeState
from sandfleet.store.base import Route
from tests.contract.store_blank_rules import BlankRules, nodes
from tests.contract.store_compared import renamed
from tests.contract.store_fixtures import LONG_S

back = st.integers(0, 2)


class ReturnRules(BlankRules):
    """What a node does that is back and holds sandboxes again."""

    ops: list[tuple[str, Identity, tuple[Route, Route]]]

    @rule(node=nodes, longer=st.booleans())
    def leave(self, node: str, longer: bool) -> None:
        """It stops and leaves its sandboxes running."""
        lease_s = LONG_S if longer else None
        self.both(lambda w, _: w.store.set_node_state(node, NodeState.AWAY, lease_s=lease_s))

    @precondition(lambda self: self.ops)
    @rule(ago=back, stranger=st.booleans())
    def reattach(self, ago: int, stranger: bool) -> None:
        """The node's current incarnation takes an operation over, whatever became of it."""
        op_id, identity, pair = self.ops[-1 - ago % len(self.ops)]
        name = "stranger" if stranger else self.incarnation(pair[0].node_id)
        new = (renamed(pair[0], name), renamed(pair[1], name))
        answers = self.both(lambda w, side: w.store.reattach(op_id, pair[side], new[side]))
        assert not (stranger and answers[0])
        if answers[0] is True:
            self.ops[-1 - ago % len(self.ops)] = (op_id, identity, new)
