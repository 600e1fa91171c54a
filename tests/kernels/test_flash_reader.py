"""The flash reader: the right bytes, and with every fault injected an error and no wrong bytes."""

import ctypes
import errno
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dejavu.errors import CheckpointError, InputError
from dejavu.kernels.compiled import extension
from dejavu.kernels.flash import Blocks, FlashReader, crc32c, crc32c_blocks

BLOCK, COUNT, START = 1024, 40, 4096


@pytest.fixture
def stored(tmp_path):
    data = torch.randint(256, (COUNT * BLOCK,), dtype=torch.uint8)
    path = tmp_path / "file"
    path.write_bytes(bytes(START) + data.numpy().tobytes())
    return path, data.view(COUNT, BLOCK), Blocks(START, BLOCK, crc32c_blocks(data, BLOCK))


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)])
def reader(request, stored):
    direct, uring = request.param
    path, _, blocks = stored
    return FlashReader(path, blocks, path.stat(), queue_depth=4, direct=direct, uring=uring)


def fetch(reader, numbers, memory=None):
    memory = torch.zeros(len(numbers), BLOCK, dtype=torch.uint8) if memory is None else memory
    numbers = torch.as_tensor(numbers, dtype=torch.int64)
    to = memory.data_ptr() + BLOCK * torch.arange(len(numbers))
    reader.wait(reader.submit(START + BLOCK * numbers, BLOCK, to))
    return memory


def test_checksums_are_those_of_rfc_3720():
    for data, expected in [
        (torch.zeros(32, dtype=torch.uint8), 0x8A9136AA),
        (torch.arange(32, dtype=torch.uint8), 0x46DD794E),
    ]:
        assert crc32c(data) == expected
    for size in range(70):
        data = torch.randint(256, (size + 1,), dtype=torch.uint8)[1:].clone()
        assert crc32c(data) == extension().crc32c_portable(data.data_ptr(), size)


@pytest.mark.parametrize("numbers", [[], [7], [39, 0, 5, 5, 6], list(range(COUNT))])
def test_reads_records_in_any_order(reader, stored, numbers):
    assert torch.equal(fetch(reader, numbers), stored[1][numbers])
    counted = reader.counters()
    assert counted.requests == len(numbers)
    assert counted.bytes_wanted == BLOCK * len(numbers)


def test_a_flipped_bit_is_found(reader, stored):
    path, _, _ = stored
    with path.open("r+b") as file:
        file.seek(START + 7 * BLOCK + 3)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    memory = torch.zeros(1, BLOCK, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=f"at byte {START + 7 * BLOCK}, is damaged"):
        fetch(reader, [7], memory)
    assert not memory.any()


def test_a_short_read_is_found(reader, stored):
    os.truncate(stored[0], START + 20 * BLOCK)
    with pytest.raises(CheckpointError, match="truncated"):
        fetch(reader, [30])


def test_a_failing_disk_is_reported(reader):
    failing = os.open("/proc/self/mem", os.O_RDONLY)  # nothing is mapped there: EIO
    os.dup2(failing, reader.fileno())
    os.close(failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        fetch(reader, [3])


def test_a_replaced_file_is_found(reader, stored):
    other = stored[0].with_name("other")
    other.write_bytes(stored[0].read_bytes())
    other.replace(stored[0])
    with pytest.raises(CheckpointError, match="replaced"):
        fetch(reader, [3])


def test_records_outside_are_refused(reader):
    with pytest.raises(InputError, match="does not begin"):
        fetch(reader, [COUNT])
    with pytest.raises(InputError, match="ticket"):
        reader.wait(99)


OPEN = Path("/proc/self/fd")


def ring_of(before):
    """The descriptor of an io_uring that was opened since."""
    for entry in set(OPEN.iterdir()) - before:
        try:
            if "io_uring" in str(entry.readlink()):
                return int(entry.name)
        except OSError:  # of the listing itself
            pass
    return None


def refuse_to_hold_buffers():
    """Let this thread's io_uring_register fail for buffers, as beyond a limit on locked memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    load, equal, give = 0x20, 0x15, 0x06  # BPF: a word of the call, jump if equal, return
    allow, out_of_memory = 0x7FFF0000, 0x00050000 | errno.ENOMEM
    code = [
        (load, 0, 0, 0),  # the call's number
        (equal, 0, 3, 427),  # io_uring_register, on every architecture
        (load, 0, 0, 24),  # its second argument
        (equal, 0, 1, 0),  # IORING_REGISTER_BUFFERS
        (give, 0, 0, out_of_memory),
        (give, 0, 0, allow),
    ]
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(lines))
    set_no_new_privileges, set_seccomp, with_filter = 38, 22, 2
    libc.prctl(set_no_new_privileges, 1, 0, 0, 0)
    libc.prctl(set_seccomp, with_filter, ctypes.create_string_buffer(program), 0, 0)
    if libc.syscall(427, -1, 0, 0, 0) == 0 or ctypes.get_errno() != errno.ENOMEM:
        pytest.skip("no filter of system calls here")


@pytest.mark.skipif(sys.platform != "linux", reason="io_uring is Linux's")
def test_a_ring_need_not_hold_its_buffers(stored):
    path, data, blocks = stored

    def read():
        refuse_to_hold_buffers()
        reader = FlashReader(path, blocks, path.stat(), queue_depth=4)
        return reader.backend, fetch(reader, range(COUNT))

    with ThreadPoolExecutor(1) as pool:  # a thread of its own: the filter stays with it
        backend, found = pool.submit(read).result()
    assert backend == FlashReader(path, blocks, path.stat(), queue_depth=4).backend
    assert torch.equal(found, data)


@pytest.mark.parametrize("under_way", [False, True])
def test_a_ring_that_fails_for_good_is_done_without(stored, under_way):
    path, data, blocks = stored
    if not OPEN.is_dir():
        pytest.skip("no list of open files here")
    before = set(OPEN.iterdir())
    reader = FlashReader(path, blocks, path.stat(), queue_depth=4)
    ring = ring_of(before)
    if ring is None:
        pytest.skip("no io_uring here")
    numbers = torch.randperm(COUNT)
    memory = torch.zeros(COUNT, BLOCK, dtype=torch.uint8)
    to = memory.data_ptr() + BLOCK * torch.arange(COUNT)
    kept = os.dup(ring)  # what is under way goes on, but nothing more is heard of it
    nothing = os.open(os.devnull, os.O_RDONLY)
    ticket = reader.submit(START + BLOCK * numbers, BLOCK, to) if under_way else None
    os.dup2(nothing, ring)
    if ticket is None:
        ticket = reader.submit(START + BLOCK * numbers, BLOCK, to)
        reader.wait(ticket)
        assert torch.equal(memory, data[numbers])
    else:  # what came back before is good, what did not is an error
        try:
            reader.wait(ticket)
            assert torch.equal(memory, data[numbers])
        except CheckpointError as error:
            assert "cannot be read" in str(error)  # noqa: PT017
    assert torch.equal(fetch(reader, [3, 39, 7]), data[[3, 39, 7]])
    for number in (kept, nothing):
        os.close(number)
