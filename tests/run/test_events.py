"""Events reach those who want to see them."""

from lockstep.events import Closed, Event, Events, Said


def test_a_subscriber_sees_the_kinds_it_named_in_the_order_in_which_all_subscribed() -> None:
    events, seen = Events(), list[tuple[str, Event]]()
    events.subscribe(lambda event: seen.append(("all", event)))
    events.subscribe(lambda event: seen.append(("said", event)), Said)
    said, closed = Said("a"), Closed(3)
    events.emit(said)
    events.emit(closed)
    assert seen == [("all", said), ("said", said), ("all", closed)]


def test_whoever_subscribes_later_sees_what_comes_then() -> None:
    events, seen = Events(), list[Event]()
    events.emit(Said("before"))
    events.subscribe(seen.append, Said)
    events.emit(Said("after"))
    assert seen == [Said("after")]
