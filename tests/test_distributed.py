"""Several processes as one run: how each finds its place, and what is said where one is missing, wrong or gone."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from wedlm_jax import distributed, lifeline
from wedlm_jax.distributed import Place, all_gather, any_process, find_place, is_main
from wedlm_jax.errors import UserError
from wedlm_jax.lifeline import meet

ALONE = {"TPU_SKIP_MDS_QUERY": "1"}  # as jax sets it where there is no TPU
SECOND = {"WEDLM_COORDINATOR": "host0:1234", "WEDLM_NUM_PROCESSES": "2", "WEDLM_PROCESS_ID": "1"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_three_variables_say_the_place():
    assert find_place(ALONE | SECOND) == Place("host0:1234", 2, 1)


@pytest.mark.parametrize(
    "environment",
    [{}, SECOND | {"WEDLM_NUM_PROCESSES": "1", "WEDLM_PROCESS_ID": "0"}, SLURM | {"SLURM_NTASKS": "1"},
     {"TPU_WORKER_HOSTNAMES": "localhost"}],
)  # fmt: skip
def test_a_single_process_has_no_place(environment):
    assert find_place(ALONE | environment) is None


def test_slurm_is_read_as_jax_reads_it(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    place = find_place(ALONE | SLURM)
    assert place is not None and place.coordinator.startswith("node3:")
    assert place[1:] == (16, 9, [1])  # one GPU for each process


def test_slurm_jobs_of_neighbouring_numbers_share_no_port(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    taken = []
    for job in ("77", "78", "4173"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        place = find_place(ALONE | SLURM)
        assert place is not None
        port = int(place.coordinator.rpartition(":")[2])
        taken += [port, port - 1]  # jax's and the lifeline's
    assert len(set(taken[:4])) == 4 and taken[4:] == taken[:2]  # of 2,048 pairs
    assert all(61440 <= port < 2**16 for port in taken)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WEDLM_PROCESS_ID": ""}, "WEDLM_PROCESS_ID is not; set all three"),
        ({"WEDLM_PROCESS_ID": "2"}, "WEDLM_PROCESS_ID=2 must be below WEDLM_NUM_PROCESSES=2"),
        ({"WEDLM_NUM_PROCESSES": "two"}, "WEDLM_NUM_PROCESSES=two is no whole number"),
        ({"WEDLM_COORDINATOR": "host0"}, "WEDLM_COORDINATOR=host0 is not HOST:PORT"),
        ({"WEDLM_COORDINATOR": "host0:1"}, "WEDLM_COORDINATOR=host0:1 is not HOST:PORT, with a port from 2 to 65535"),
        ({"WEDLM_COORDINATOR": "host0:65536"}, "is not HOST:PORT, with a port from 2 to 65535"),
    ],
)
def test_bad_variables_are_named(changed, message):
    with pytest.raises(UserError) as error:
        find_place(ALONE | SECOND | changed)
    assert message in str(error.value)


def test_a_cluster_that_does_not_answer_is_told(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        UserError, match="set WEDLM_COORDINATOR, WEDLM_NUM_PROCESSES, WEDLM_PROCESS_ID for each process"
    ):
        find_place(ALONE | {"TPU_WORKER_HOSTNAMES": "a,b", "WEDLM_START_TIMEOUT": "1"})


def test_a_process_alone_agrees_with_itself():
    assert is_main()
    assert any_process(True) is True and any_process(False) is False
    np.testing.assert_array_equal(all_gather(np.array([3, 4])), [[3, 4]])
    with distributed.together():
        pass


def test_process_0_that_is_not_there_is_named():
    with pytest.raises(UserError, match="process 1 cannot reach process 0 at localhost"):
        meet("localhost", free_port(), 1, 2, timeout=0.5)


def test_a_connection_that_is_gone_before_a_word_is_said_is_tried_again(monkeypatch):
    def accepted_and_closed(*_, **__):
        own, other = socket.socketpair()
        other.close()
        return own

    monkeypatch.setattr(lifeline.socket, "create_connection", accepted_and_closed)
    with pytest.raises(lifeline.NotMet, match="process 1 cannot reach process 0 at localhost"):
        meet("localhost", free_port(), 1, 2, timeout=0.5)


def test_a_process_that_does_not_come_is_named():
    with pytest.raises(UserError, match="of 3 processes, 1, 2 did not come"):
        meet("localhost", free_port(), 0, 3, timeout=0.5)


@pytest.mark.parametrize("index", [0, 1])
def test_where_the_others_do_not_come_the_run_may_be_tried_again(monkeypatch, capsys, index):
    place = {"WEDLM_COORDINATOR": f"localhost:{free_port() + 1}", "WEDLM_PROCESS_ID": str(index)}
    for name, value in (place | {"WEDLM_NUM_PROCESSES": "2", "WEDLM_START_TIMEOUT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended, distributed.together():
        pass
    assert ended.value.code == lifeline.TRY_AGAIN
    assert capsys.readouterr().err.startswith(
        ("error: of 2 processes, 1 did not come", "error: process 1 cannot reach")[index]
    )


@pytest.fixture
def joined(monkeypatch):
    """Makes this one of two processes; in the list is where it looks for process 0, and that it tells it of its failure."""

    class Line:
        def fail(self):
            asked.append("fail")

        def refuse(self):
            asked.append("refuse")

        def end(self, status):
            raise SystemExit(status)

    asked: list[str] = []
    for name, value in (SECOND | {"WEDLM_COORDINATOR": "[::1]:1234"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "meet", lambda host, *_: asked.append(host) or Line())
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda *_, **__: None)
    return asked


def test_ctrl_c_is_one_word_and_the_status_that_shells_have_for_it(joined, capsys):
    with pytest.raises(SystemExit) as ended, distributed.together():
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")
    assert joined == ["::1", "fail"]  # the host as the system's look-up takes it


def test_where_the_lifeline_knows_why_a_collective_broke_it_speaks_before_the_traceback(joined, monkeypatch, capsys):
    told = []
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds: told.append(capsys.readouterr().err))
    with pytest.raises(SystemExit) as ended, distributed.together():
        raise RuntimeError("Connection reset by peer")
    assert told == [""] and "Connection reset" in capsys.readouterr().err
    assert ended.value.code == 1 and joined[1:] == ["fail"]


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on port {port}"):
            meet("localhost", port, 0, 2, timeout=1)


def test_a_port_of_jax_that_is_in_use_is_bad_input_for_all(joined, monkeypatch, capsys):
    """jax itself ends process 0 by a segmentation fault, of which the others would say to start again."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {"WEDLM_COORDINATOR": f"localhost:{port}", "WEDLM_PROCESS_ID": "0"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended, distributed.together():
            pass
    assert (ended.value.code, joined) == (lifeline.BAD_INPUT, ["localhost", "refuse"])
    assert f"error: process 0 cannot listen on port {port} (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "index", "message"),
    [(3, 1, "process 1 counts 3 processes and process 0 2"), (2, 0, "two processes have the index 0")],
)
def test_a_process_of_another_run_is_named(count, index, message):
    port, caller = free_port(), []

    def call():
        try:
            lifeline._call("localhost", port, index, count, lifeline.time.monotonic() + 5)
        except UserError as error:
            caller.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    with pytest.raises(UserError, match=message):
        meet("localhost", port, 0, 2, timeout=5)
    thread.join()
    assert "ended before all" in str(caller[0])
    assert not isinstance(caller[0], lifeline.NotMet)  # process 0 has said that it is no use to come again


@pytest.mark.parametrize("gone", [True, False])
def test_a_process_that_is_started_again_before_all_are_here_takes_its_own_place(gone):
    """And where the first one lives, two processes have one index."""
    port, results = free_port(), []
    hello = lifeline._HELLO.pack(lifeline._MAGIC, 3, 1)

    def listen():
        try:
            results.append(lifeline._listen(port, 3, lifeline.time.monotonic() + 10, 10))
        except UserError as error:
            results.append(error)

    def say(hello: bytes) -> socket.socket:
        for _ in range(100):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("localhost", port), timeout=10)
                connection.sendall(hello)
                return connection
            lifeline.time.sleep(0.05)
        raise AssertionError("nobody listens")

    thread = threading.Thread(target=listen)
    thread.start()
    first = say(hello)
    if gone:
        first.close()
    again = say(hello)
    other = say(lifeline._HELLO.pack(lifeline._MAGIC, 3, 2)) if gone else None
    thread.join()
    words = [lifeline._receive(connection) for connection in (again, other) if connection is not None]
    if gone:
        assert list(results[0]) == [1, 2] and words == [lifeline._ALL_HERE] * 2
    else:
        assert "two processes have the index 1" in str(results[0]) and words == [lifeline._REFUSED]


def test_a_stranger_at_the_port_is_ignored():
    port = free_port()
    ends: dict[int, lifeline.Lifeline] = {}

    def come(index: int):
        ends[index] = meet("localhost", port, index, 2, timeout=10)

    first = threading.Thread(target=come, args=(0,))
    first.start()
    for _ in range(100):
        try:
            with socket.create_connection(("localhost", port), timeout=1) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            break
        except OSError:
            lifeline.time.sleep(0.05)
    else:
        pytest.fail("no stranger was let in")
    second = threading.Thread(target=come, args=(1,))
    second.start()
    first.join(), second.join()
    ends[0].finish(), ends[1].finish()  # or the watching threads would end this process


def test_a_process_that_is_gone_ends_this_one_with_its_number(monkeypatch, capsys):
    here, there = tcp_pair()
    ended = threading.Event()
    monkeypatch.setattr(lifeline.os, "_exit", lambda status: (ended.set(), threading.Event().wait()))
    lifeline.Lifeline({1: here}, 0, 2)
    there.close()
    assert ended.wait(5)
    assert "error: process 1 of 2 is gone" in capsys.readouterr().err


def test_bad_input_in_one_process_ends_all_with_its_status(monkeypatch, capsys):
    """Also those that hear of it from process 0 alone."""
    first, second = tcp_pair(), tcp_pair()
    statuses, both = [], threading.Event()

    def end(status):
        statuses.append(status)
        if len(statuses) == 2:
            both.set()
        threading.Event().wait()

    monkeypatch.setattr(lifeline.os, "_exit", end)
    lifeline.Lifeline({1: first[0], 2: second[0]}, 0, 3)
    lifeline.Lifeline({0: second[1]}, 2, 3)
    lifeline.Lifeline({0: first[1]}, 1, 3).refuse()
    assert both.wait(5)
    assert statuses == [lifeline.BAD_INPUT] * 2
    said = capsys.readouterr().err.splitlines()
    assert sorted(line[-22:] for line in said) == ["so process 0 stops too", "so process 2 stops too"]
    assert all("another of the 3 processes ended with bad input" in line for line in said)


def test_a_process_that_finds_the_bad_input_itself_is_left_to_say_it(monkeypatch):
    here, there = tcp_pair()
    ended = []  # by its watcher, in a thread of its own
    monkeypatch.setattr(lifeline.os, "_exit", ended.append)
    slow = lifeline.Lifeline({1: here}, 0, 2)
    lifeline.Lifeline({0: there}, 1, 2).refuse()
    slow.refuse()
    there.shutdown(socket.SHUT_RDWR)
    lifeline.time.sleep(2 * lifeline._GRACE_SECONDS)
    assert not ended


@pytest.mark.parametrize(("index", "says"), [(0, "refuse"), (1, "refuse"), (0, "fail"), (1, "fail")])
def test_process_0_ends_last_as_jax_aborts_who_loses_its_service(monkeypatch, index, says):
    """Whichever of the two has the error; an aborted process would tell a scheduler to start the run again."""
    here, there = tcp_pair()
    order, both = [], threading.Event()

    def end(status):
        order.append(threading.current_thread().name)
        if len(order) == 2:
            both.set()
        threading.Event().wait()

    monkeypatch.setattr(lifeline.os, "_exit", end)
    ends = lifeline.Lifeline({1: here}, 0, 2), lifeline.Lifeline({0: there}, 1, 2)
    getattr(ends[index], says)()
    threading.Thread(target=ends[index].end, args=(1,), daemon=True, name="has the error").start()
    assert both.wait(5)
    assert order[index == 0] == "has the error"  # process 0 is the second


def test_a_process_that_has_finished_is_not_missed(monkeypatch):
    here, there = tcp_pair()
    ended = []  # by its watcher, in a thread of its own
    monkeypatch.setattr(lifeline.os, "_exit", ended.append)
    end = lifeline.Lifeline({1: here}, 0, 2)
    lifeline.Lifeline({0: there}, 1, 2).finish()
    there.close()
    lifeline.time.sleep(0.2)
    assert not ended and not end._finished
