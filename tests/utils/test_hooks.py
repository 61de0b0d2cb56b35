"""What a Checkpointer asks of its hooks, and in which order."""

from contextlib import contextmanager

import pytest
import torch

from tests.utils.test_checkpoint import checkpointer, make_state, save
from utils.checkpoint_file import read_checkpoint
from utils.errors import SilentExit, UserError
from utils.hooks import FileForm, Hook, Hooks


class Recorder(FileForm):
    """Notes each call in `calls`, a list that several hooks may share."""

    def __init__(self, calls, is_due=False):
        self.calls, self.is_due, self.count = calls, is_due, 0

    def note(self, *event):
        self.calls.append((type(self).__name__, *event))

    def state_dict(self):
        self.note("state_dict")
        return {"count": self.count}

    def load_state_dict(self, state):
        self.note("load_state_dict", state["count"])
        self.count = state["count"]

    def after_load(self, checkpoint):
        self.note("after_load", checkpoint.epoch)

    def after_step(self, checkpoint):
        if self.is_due:
            checkpoint.request_save(ends_run=False)
        self.note("after_step", checkpoint.is_due())

    def before_save(self, checkpoint, between_steps):
        self.note("before_save", between_steps)

    def after_save(self, checkpoint):
        self.note("after_save")

    @contextmanager
    def context(self, checkpoint):
        self.note("enter")
        try:
            yield
        finally:
            self.note("leave")

    def from_file(self, checkpoint, path, contents):
        self.note("from_file", path.name)
        return contents

    def to_file(self, checkpoint, contents):
        self.note("to_file")
        return contents


class First(Recorder):
    pass


class Second(Recorder):
    pass


class Doubled(FileForm):
    """Doubles a weight, for files only."""

    @contextmanager
    def context(self, checkpoint):
        weight = checkpoint.model[0].weight.data
        weight *= 2
        try:
            yield
        finally:
            weight /= 2


class Failing(FileForm):
    @contextmanager
    def context(self, checkpoint):
        raise UserError("cannot be brought into that form")
        yield


def both(*events):
    """What two hooks note for events which the first one sees before the second one."""
    return [(name, *event) for event in events for name in ("First", "Second")]


# Order


def test_start_of_a_run_calls_the_hooks_once_everything_is_loaded(tmp_path):
    calls = []
    hooks = [First(calls), Second(calls)]
    checkpointer(tmp_path, hooks=hooks).load()
    start = both(("after_load", 0), ("state_dict",))  # which could be read: nothing is written yet
    assert calls == start
    hooks[0].count = 7
    save(tmp_path, make_state(), epoch=1, hooks=hooks)
    calls.clear()
    resumed = [First(calls), Second(calls)]
    assert checkpointer(tmp_path, hooks=resumed).load() == 1
    assert calls == [
        *both(("from_file", "last.pt"), ("enter",)),
        ("Second", "leave"),
        ("First", "leave"),
        ("First", "load_state_dict", 7),
        ("Second", "load_state_dict", 0),
        *both(("after_load", 1), ("state_dict",)),
    ]


def test_save_calls_the_hooks_in_order(tmp_path):
    calls = []
    save(tmp_path, make_state(), hooks=[First(calls), Second(calls)])
    assert calls == [
        *both(("before_save", False), ("enter",), ("state_dict",), ("to_file",)),
        ("Second", "leave"),
        ("First", "leave"),
        *both(("after_save",)),
    ]


@pytest.mark.parametrize("due", [(), ("First",), ("Second",)], ids=str)
@pytest.mark.parametrize("step", [2, 5])
def test_step_calls_every_hook_and_saves_if_one_asks_for_it(due, step, tmp_path):
    """Hooks after the one that asks know that a save follows."""
    calls, state = [], make_state()
    hooks = [kind(calls, is_due=kind.__name__ in due) for kind in (First, Second)]
    writer = checkpointer(tmp_path, state, hooks)
    state["loader"].step = step
    Hooks(hooks).after_step(writer)
    is_last = step == len(state["loader"])
    assert calls == [
        ("First", "after_step", due == ("First",) or is_last),
        ("Second", "after_step", bool(due) or is_last),
    ]
    assert not (tmp_path / "last.pt").exists()
    writer.step()
    writer.wait()
    is_saved = bool(due) and not is_last  # at the end of the epoch, the script saves
    assert [call for call in calls if call[1] == "before_save"] == (
        both(("before_save", True)) if is_saved else []
    )
    assert (tmp_path / "last.pt").exists() == is_saved
    Hooks([]).after_step(writer)
    writer.step()  # a request counts once
    assert len([call for call in calls if call[1] == "before_save"]) == 2 * is_saved


def test_loop_that_does_not_call_the_hooks_is_told(tmp_path):
    """It would ignore signals, for example: a copied loop is older than the module."""
    writer = checkpointer(tmp_path, hooks=[Hook()])
    with pytest.raises(UserError, match=r"call hooks\.after_step\(checkpoint\) before"):
        writer.step()


# State


def test_state_of_hooks_is_part_of_the_checkpoint(tmp_path):
    first, calls = First([]), []
    first.count = 3
    save(tmp_path, make_state(), hooks=[first])
    assert read_checkpoint(tmp_path / "last.pt")["hooks"] == {"First": {"count": 3}}
    resumed = [Second(calls), First(calls)]  # one of them is new, and their order does not matter
    checkpointer(tmp_path, hooks=resumed).load()
    assert [hook.count for hook in resumed] == [0, 3]
    assert checkpointer(tmp_path).load() == 1  # what belonged to a hook is ignored without it


def test_hook_does_nothing_by_default(tmp_path):
    for name, hooks in (("without", []), ("with", [Hook()])):
        state = make_state()
        writer = checkpointer(tmp_path / name, state, hooks, save_steps=2, epochs=2)
        (tmp_path / name).mkdir()
        writer.load()
        for state["loader"].step in (1, 2):
            Hooks(hooks).after_step(writer)
            writer.step()
        writer.save(1)
        writer.wait()
    ours, theirs = (read_checkpoint(tmp_path / name / "last.pt") for name in ("with", "without"))
    assert ours.pop("hooks") == {"Hook": {}} and theirs.pop("hooks") == {}
    for contents in (ours, theirs):
        del contents["config"]["output_dir"], contents["id"]
    assert str(ours) == str(theirs)


# Contents


def test_each_hook_gets_what_the_one_before_has_made(tmp_path):
    class AddOne(FileForm):
        def to_file(self, checkpoint, contents):
            return contents | {"note": [*contents.get("note", []), "one"]}

        def from_file(self, checkpoint, path, contents):
            assert path == tmp_path / "last.pt"
            return contents | {"epoch": contents["epoch"] + 1}

    class AddTwo(AddOne):
        def to_file(self, checkpoint, contents):
            return contents | {"note": [*contents["note"], "two"]}

        def from_file(self, checkpoint, path, contents):
            return contents | {"epoch": contents["epoch"] * 10}

    hooks = [AddOne(), AddTwo()]
    save(tmp_path, make_state(), epoch=1, hooks=hooks)
    assert read_checkpoint(tmp_path / "last.pt")["note"] == ["one", "two"]
    assert checkpointer(tmp_path, hooks=hooks).load() == 20  # what was selected is loaded


def test_hook_may_end_the_run_after_a_save(tmp_path):
    class End(Hook):
        def after_save(self, checkpoint):
            checkpoint.wait()
            raise SilentExit

    with pytest.raises(SilentExit):
        checkpointer(tmp_path, hooks=[End()]).save(1)
    assert read_checkpoint(tmp_path / "last.pt")["epoch"] == 1


# The form of files


@pytest.mark.parametrize("is_sharded", [False, True])
def test_model_has_the_form_of_files_in_files_only(is_sharded, tmp_path):
    state = make_state()
    weight = state["model"][0].weight.detach().clone()
    save(tmp_path, state, hooks=[Doubled()], save_sharded=is_sharded)
    assert torch.equal(state["model"][0].weight, weight)
    saved = read_checkpoint(tmp_path / "last.pt")["model"]["0.weight"]
    assert torch.equal(saved, 2 * weight)
    other = make_state(seed=1)
    checkpointer(tmp_path, other, [Doubled()]).load()
    assert torch.equal(other["model"][0].weight, saved / 2)


@pytest.mark.parametrize("kind", ["reading", "saving", "entering"])
def test_form_of_files_is_undone_even_if_that_fails(kind, tmp_path):
    state, hooks = make_state(width=4), [Doubled()]
    if kind == "reading":
        save(tmp_path, make_state(width=3))  # a different model
    if kind == "entering":
        hooks.append(Failing())
    if kind == "saving":
        state["odd"] = object()  # which no checkpoint can hold
    writer = checkpointer(tmp_path, state, hooks)
    weight = state["model"][0].weight.detach().clone()
    with pytest.raises(UserError):
        writer.load() if kind == "reading" else writer.save(1)
    assert torch.equal(state["model"][0].weight, weight)


def test_hooks_whose_states_would_be_mixed_up_are_refused(tmp_path):
    """A checkpoint knows them by the names of their classes."""
    with pytest.raises(UserError, match=r"two hooks .* Recorder: rename"):
        checkpointer(tmp_path, make_state(), hooks=[Recorder([]), Recorder([])])
