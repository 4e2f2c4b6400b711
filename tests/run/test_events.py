"""Events: made for readers only, stamped with time, worker and step, in order of subscription."""

from lockstep.events import Closed, Event, Events, LaneBegan, Note, Wait, WaitBegan, WaitEnded


def test_an_event_goes_to_those_who_want_its_kind_in_the_order_they_subscribed() -> None:
    events, seen = Events(), list[tuple[str, type[Event]]]()
    events.subscribe(lambda event: seen.append(("all", type(event))))
    events.subscribe(lambda event: seen.append(("notes", type(event))), Note)
    events.note("a")
    events.emit(Closed)
    assert seen == [("all", Note), ("notes", Note), ("all", Closed)]


def test_who_subscribes_later_sees_what_comes_later() -> None:
    events, seen = Events(), list[Event]()
    events.note("before")
    events.subscribe(seen.append, Note)
    events.note("after")
    assert [event.text for event in seen if isinstance(event, Note)] == ["after"]


def test_an_event_carries_the_time_the_worker_and_the_step() -> None:
    events, seen = Events(worker=2, clock=lambda: 7.5), list[Event]()
    events.subscribe(seen.append)
    events.step = 3
    events.emit(LaneBegan, 1, trains=True)
    events.emit(LaneBegan, 1, trains=True, step=9)
    assert [(event.time_s, event.worker, event.step) for event in seen] == [(7.5, 2, 3), (7.5, 2, 9)]


def test_an_event_that_nobody_reads_is_not_made() -> None:
    events = Events()
    events.subscribe(lambda event: None, Note)

    def never() -> Event:
        raise AssertionError("it was made")

    events.emit(never)
    assert not events.has_readers(Closed)
    assert events.has_readers(Note)


def test_a_wait_that_fails_has_no_end() -> None:
    events, seen = Events(), list[Event]()
    events.subscribe(seen.append)
    with events.waiting(Wait.TOTAL):
        pass
    try:
        with events.waiting(Wait.END):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert [(type(event), event.wait) for event in seen if isinstance(event, WaitBegan | WaitEnded)] == [
        (WaitBegan, Wait.TOTAL), (WaitEnded, Wait.TOTAL), (WaitBegan, Wait.END),
    ]  # fmt: skip


def test_a_record_is_what_was_given_by_position_and_no_event_is_made_for_it() -> None:
    events, records = Events(clock=lambda: 7.5), list[object]()
    events.record([LaneBegan], records.append)
    events.emit(LaneBegan, 1, True, data="not kept", step=9)
    events.emit(Closed)
    events.stop_recording()
    events.emit(LaneBegan, 2, True)
    assert records == [(7.5, "LaneBegan", 9, (1, True))]
    assert not events.has_readers(LaneBegan)
