"""The group coordinator's rules for one consumer group of the classic protocol with the eager assignment: pure functions.

They follow Kafka's ``ClassicGroup`` and ``GroupMetadataManager`` (4.3), with two simplifications. A request to join is answered
at once: "not yet" where the real coordinator lets it wait for the other members. And the coordinator divides the partitions,
which a member, the leader, does in the classic protocol.

What transactions need of a group: offsets in a transaction are refused if they name a member that the group does not have, or
another generation than the present one, and taken from nobody in particular if they name neither (KIP-447); committed offsets
that an open transaction may still replace are not told to a consumer that asks for stable ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from simulator.requests import (
    DescribeGroup,
    DescribeGroupResponse,
    ErrorCode,
    ErrorResponse,
    GroupHeartbeat,
    JoinGroup,
    JoinGroupResponse,
    LeaveGroup,
    TopicPartition,
    TxnOffsetCommit,
)

if TYPE_CHECKING:
    from simulator.state import Broker


class GroupMember(NamedTuple):
    """A member. ``joined``: whether it has joined the generation to come."""

    member_id: str
    client_id: str
    joined: bool = True
    assigned: tuple[TopicPartition, ...] = ()


class ConsumerGroup(NamedTuple):
    """A group. ``rebalancing``: whether its members must join again; ``ids_given``: how many members it has had."""

    group_id: str
    generation: int = 0
    members: tuple[GroupMember, ...] = ()
    rebalancing: bool = False
    ids_given: int = 0

    def member(self, member_id: str) -> GroupMember | None:
        """The member of this id; None if the group does not have it."""
        return next((one for one in self.members if one.member_id == member_id), None)


def group_of(broker: Broker, group_id: str) -> ConsumerGroup:
    """The group; an empty one if nobody has joined it."""
    return next((one for one in broker.groups if one.group_id == group_id), ConsumerGroup(group_id))


def join_group(broker: Broker, request: JoinGroup) -> tuple[Broker, JoinGroupResponse]:
    """Join, or join again; the last one to do so completes the generation."""
    group = group_of(broker, request.group_id)
    member_id = request.member_id
    if not member_id:
        member_id = f"{request.client_id}-{group.ids_given + 1}"
        new = GroupMember(member_id, request.client_id)
        group = _rebalancing(group)
        group = group._replace(members=(*group.members, new), ids_given=group.ids_given + 1)
    elif group.member(member_id) is None:
        return broker, JoinGroupResponse(ErrorCode.UNKNOWN_MEMBER_ID)
    elif group.rebalancing:
        joined = [one._replace(joined=True) if one.member_id == member_id else one for one in group.members]
        group = group._replace(members=tuple(joined))
    group = _completed(broker, group)
    broker = _with(broker, group)
    if group.rebalancing:
        return broker, JoinGroupResponse(ErrorCode.REBALANCE_IN_PROGRESS, member_id)
    member = group.member(member_id)
    assert member is not None
    return broker, JoinGroupResponse(ErrorCode.NONE, member_id, group.generation, member.assigned)


def _rebalancing(group: ConsumerGroup) -> ConsumerGroup:
    """Let the members join again, unless they are about to: members that have joined already stay so."""
    if group.rebalancing:
        return group
    return group._replace(members=tuple(one._replace(joined=False) for one in group.members), rebalancing=True)


def _completed(broker: Broker, group: ConsumerGroup) -> ConsumerGroup:
    """Begin the next generation if every member has joined it."""
    if not group.rebalancing or not all(one.joined for one in group.members):
        return group
    topic = broker.group_topic
    places = [found.topic_partition for found in broker.partitions if found.topic_partition[0] == topic]
    count = len(group.members)
    # Another member begins each time, so that partitions move.
    members = tuple(
        one._replace(assigned=tuple(places[(index + group.generation) % count :: count]))
        for index, one in enumerate(group.members)
    )
    return group._replace(generation=group.generation + 1, members=members, rebalancing=False)


def heartbeat(broker: Broker, request: GroupHeartbeat) -> tuple[Broker, ErrorResponse]:
    """Answer a member: whether the group has changed."""
    group = group_of(broker, request.group_id)
    if group.member(request.member_id) is None:
        return broker, ErrorResponse(ErrorCode.UNKNOWN_MEMBER_ID)
    if group.rebalancing:
        return broker, ErrorResponse(ErrorCode.REBALANCE_IN_PROGRESS)
    code = ErrorCode.NONE if request.generation == group.generation else ErrorCode.ILLEGAL_GENERATION
    return broker, ErrorResponse(code)


def leave_group(broker: Broker, request: LeaveGroup) -> tuple[Broker, ErrorResponse]:
    """Leave at once."""
    return expel(broker, request.group_id, request.member_id), ErrorResponse(ErrorCode.NONE)


def expel(broker: Broker, group_id: str, member_id: str) -> Broker:
    """The coordinator has not heard of a member for too long."""
    group = group_of(broker, group_id)
    if group.member(member_id) is None:
        return broker
    group = _rebalancing(group)
    group = group._replace(members=tuple(one for one in group.members if one.member_id != member_id))
    return _with(broker, _completed(broker, group) if group.members else group._replace(rebalancing=False))


def describe_group(broker: Broker, request: DescribeGroup) -> tuple[Broker, DescribeGroupResponse]:
    """The client ids of the members."""
    group = group_of(broker, request.group_id)
    return broker, DescribeGroupResponse(tuple(one.client_id for one in group.members))


def offsets_refused(broker: Broker, request: TxnOffsetCommit) -> ErrorCode:
    """Whether a member may commit offsets in its transaction. While members join, the old generation still may."""
    if not request.member_id and request.generation < 0:
        return ErrorCode.NONE
    group = group_of(broker, request.group_id)
    if group.member(request.member_id) is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return ErrorCode.NONE if request.generation == group.generation else ErrorCode.ILLEGAL_GENERATION


def _with(broker: Broker, group: ConsumerGroup) -> Broker:
    others = [one for one in broker.groups if one.group_id != group.group_id]
    return broker._replace(groups=tuple(sorted([*others, group])))
