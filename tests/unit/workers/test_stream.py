"""The messages that a draft worker makes of its events: none is larger than an orchestrator takes."""

from draft_service.stream import Stream
from outrider.net.bounds import MAX_COMMANDS, MAX_EVENT_BYTES
from outrider.net.channel import MAX_DRAFT_BYTES
from outrider.v1.draft_pb2 import Block, DraftEvent, DraftResponse


async def test_events_travel_in_messages_that_an_orchestrator_takes() -> None:
    large = Block(tokens=bytes(MAX_EVENT_BYTES - 100))
    events = [DraftEvent(session_id=f"{index}", block=large if index % 3 else None) for index in range(40)]
    events += [DraftEvent(session_id=f"{40 + index}") for index in range(3 * MAX_COMMANDS)]
    stream = Stream(1)
    stream.push(events)
    stream.finish_reading()
    messages = []
    while sent := await stream.next_events():
        messages.append(DraftResponse(events=sent))
    assert max(message.ByteSize() for message in messages) < MAX_DRAFT_BYTES / 2
    assert max(len(message.events) for message in messages) <= MAX_COMMANDS
    order = [int(event.session_id) for message in messages for event in message.events]
    assert order == list(range(len(events)))
