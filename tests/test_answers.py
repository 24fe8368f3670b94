"""What a worker says of its orders until it was heard (roles/answers.py)."""

from __future__ import annotations

from dbctl.roles.answers import KEPT, Answers
from dbctl.roles.base import NEVER, Send
from dbctl.wire_batch import Computed


def computed(number: int) -> Computed:
    return Computed(number, 1, number, (1.0,))


def said(answers: Answers, now: float) -> list[int]:
    """The numbers that are said again by `now`."""
    numbers = []
    for effect in answers.resend(now):
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Computed)
        assert effect.to == "controller"
        numbers.append(effect.message.number)
    return numbers


def test_at_once_and_again_with_doubling_back_off_until_heard() -> None:
    answers = Answers(0.25)
    assert answers.due == NEVER
    assert answers.say(0.0, computed(1)) == [Send("controller", computed(1))]
    times = [t / 8 for t in range(1, 41) if said(answers, t / 8)]
    assert times == [0.25, 0.75, 1.75, 3.75]
    answers.heard(5.0, [2])
    assert answers.due == NEVER
    assert said(answers, 99.0) == []


def test_all_that_are_open_are_said_together() -> None:
    answers = Answers(0.25)
    answers.say(0.0, computed(2))
    answers.say(0.1, computed(1))
    assert said(answers, 0.2) == []
    assert said(answers, 0.25) == [1, 2]  # the newest does not put off what is due
    answers.heard(1.0, [2, 3])
    assert said(answers, 9.0) == [2]


def test_what_was_silenced_is_said_when_a_work_has_it() -> None:
    answers = Answers(0.25)
    answers.say(0.0, computed(1))
    answers.heard(0.1, [])
    answers.heard(1.0, [1])
    assert answers.due == 1.25
    answers.heard(1.2, [1])
    assert answers.due == 1.25, "a Work each fifth of a second does not put it off for ever"
    assert said(answers, 1.25) == [1]


def test_an_order_that_is_not_done_is_not_answered() -> None:
    answers = Answers(0.25)
    answers.heard(0.0, [1, 2])
    assert answers.due == NEVER


def test_what_is_not_heard_is_kept_however_many_come_after_it() -> None:
    """One lost Computed, and orders that are done faster than it is said again."""
    answers = Answers(0.25)
    for number in range(1, 3 * KEPT):
        answers.say(number / 100, computed(number))
        if number > 1:
            answers.heard(number / 100, [1, number + 1])
    assert said(answers, 1.0) == [1]


def test_few_that_were_heard_are_kept() -> None:
    answers = Answers(0.25)
    for number in range(1, KEPT + 3):
        answers.say(0.0, computed(number))
        answers.heard(0.0, [])
    answers.heard(2.0, range(1, 99))
    assert said(answers, 9.0) == list(range(3, KEPT + 3))


def test_forgotten_ones_are_not_said_whatever_is_heard() -> None:
    answers = Answers(0.25)
    answers.say(0.0, computed(1))
    answers.forget()
    answers.heard(0.0, [1])
    assert answers.due == NEVER
