"""Checkpoints changed at random after they were written: every change is found when they are read."""

import random
import shutil

import pytest
from test_trainer_checkpoint import FILES, save
from tiers import extra

from stoker.trainer.checkpoint.reader import newest_checkpoint


def flip_bits(chance, path, others):
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 1, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(chance, path, others):
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def append(chance, path, others):
    path.write_bytes(path.read_bytes() + chance.choice([b"\0", b"\n", b" ", chance.randbytes(chance.randrange(1, 99))]))


def zero(chance, path, others):
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    count = min(chance.choice([1, 16, 512]), len(data) - start)
    data[start : start + count] = bytes(count)
    path.write_bytes(data)


def swap_bytes(chance, path, others):
    data = bytearray(path.read_bytes())
    a, b = chance.randrange(len(data)), chance.randrange(len(data))
    data[a], data[b] = data[b], data[a]
    path.write_bytes(data)


def delete(chance, path, others):
    path.unlink()


def swap_files(chance, path, others):
    """With another file of the same checkpoint, or the same file of another checkpoint."""
    other = chance.choice([path.with_name(chance.choice(FILES)), *(other / path.name for other in others)])
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    if other.parent == path.parent:
        other.write_bytes(ours)


CHANGES = [flip_bits, truncate, append, zero, swap_bytes, delete, swap_files]


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("count", [70, *extra(700)])
def test_every_random_change_is_found_and_the_checkpoint_before_is_used(tmp_path, count):
    chance = random.Random(count)
    save(tmp_path, 1)
    whole = save(tmp_path, 2)
    sound = contents(whole)
    changed = 0
    while changed < count:
        shutil.rmtree(whole)
        whole.mkdir()
        for name, data in sound.items():
            (whole / name).write_bytes(data)
        change, file = CHANGES[changed % len(CHANGES)], chance.choice(FILES)
        change(chance, whole / file, [tmp_path / "step-1"])
        if contents(whole) == sound:
            continue
        changed += 1
        checkpoint, complaints = newest_checkpoint(tmp_path)
        assert checkpoint is not None, (change.__name__, file)
        assert checkpoint.state.step == 1, (change.__name__, file)
        assert len(complaints) == 1
        assert complaints[0].startswith(f"{whole} is damaged (")
        assert complaints[0].endswith("using the one before it")
        assert "\n" not in complaints[0]
