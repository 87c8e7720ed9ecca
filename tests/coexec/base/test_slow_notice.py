"""Notices of what takes long come from one thread, in order, and it ends when there is nothing to say."""

import logging
import threading
import time

from coexec.base.slow_notice import SlowNotice


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "coexec slow notices"]


def test_only_what_takes_long_is_told(caplog, tune):
    tune(slow_seconds=0.2)
    with caplog.at_level(logging.WARNING, "coexec"):
        with SlowNotice("one", "here"), SlowNotice("other", "there"):
            for n in range(50):
                with SlowNotice(f"short {n}", "at once"):
                    pass
            assert len(watchers()) == 1
            deadline = time.monotonic() + 10.0
            while len(caplog.messages) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert sorted(caplog.messages[:2]) == [
            "one: takes more than 0 s, here", "other: takes more than 0 s, there"
        ]  # fmt: skip
    assert [message.partition(":")[0] for message in caplog.messages[2:]] == ["other", "one"]


def test_its_thread_ends(tune):
    tune(slow_seconds=0.05)
    for _ in range(2):  # and begins again
        with SlowNotice("one", "here"):
            assert len(watchers()) == 1
        for thread in watchers():
            thread.join(10.0)
        assert not watchers()
