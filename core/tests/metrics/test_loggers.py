"""The logging stat logger."""

import logging
from types import SimpleNamespace

from specdec.metrics import LoggingStatLogger, StepStats
from specdec.metrics.plugin import stat_logger


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "specdec.stats"]


def test_one_line_an_interval(caplog):
    caplog.set_level(logging.INFO, "specdec.stats")
    clock = Clock()
    logger = LoggingStatLogger(10.0, clock=clock)
    for _ in range(25):
        logger.record(StepStats(num_generated_tokens=4, num_running=2, num_waiting=1, kv_usage=0.5))
        clock.now += 1.0
    assert len(lines(caplog)) == 2
    assert lines(caplog)[1].startswith("4.4 tokens/s generated")
    assert lines(caplog)[0].startswith(
        "4.4 tokens/s generated, 0.0 tokens/s prompt, running 2, waiting 1, KV cache 50.0%"
    )


def test_speculation_is_told_when_there_was_any(caplog):
    caplog.set_level(logging.INFO, "specdec.stats")
    logger = LoggingStatLogger(10.0, clock=Clock())
    logger.record(StepStats(num_generated_tokens=1))
    logger.flush()
    assert "acceptance" not in lines(caplog)[0]
    logger.record(StepStats(num_drafts=2, num_draft_tokens_per_pos=(2, 2), num_accepted_tokens_per_pos=(2, 1)))
    logger.close()
    assert "acceptance length 2.50 (3 of 4 draft tokens; of all drafts 100% 50% at each position)" in lines(caplog)[1]


def test_closing_writes_the_rest_once_and_nothing_when_idle(caplog):
    caplog.set_level(logging.INFO, "specdec.stats")
    logger = LoggingStatLogger(10.0, clock=Clock())
    logger.close()
    assert lines(caplog) == []
    logger.record(StepStats())
    logger.close()
    logger.close()
    assert len(lines(caplog)) == 1


def test_nothing_is_formatted_when_nobody_listens(caplog):
    caplog.set_level(logging.WARNING, "specdec.stats")
    logger = LoggingStatLogger(0.001, clock=Clock())
    logger.record(StepStats())
    logger.flush()
    assert lines(caplog) == []


def test_the_plugin_takes_the_interval_from_the_configuration():
    logger = stat_logger(engine=SimpleNamespace(settings={"log_stats_interval": 3.5}))
    assert logger._interval == 3.5
