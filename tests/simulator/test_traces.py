from pathlib import Path

import pytest

from headrace_shared.errors import ConfigError
from headrace_simulator.traces import Trace, read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:47.5000000,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:17:50.9951690,879,55
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
118.5,GPT-4,1360,374,1734,API log
"""


def read(tmp_path: Path, text: str, step_s: float = 1.0, weight: int = 1) -> Trace:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(str(path), step_s=step_s, weight=weight)


def test_the_azure_layout_in_any_order(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    assert trace.num_steps == 125
    assert trace.arrivals(0).prompts.tolist() == [374, 396] and trace.arrivals(0).answers.tolist() == [44, 109]
    assert trace.arrivals(124).prompts.tolist() == [879]
    assert sum(trace.arrivals(step).num for step in range(trace.num_steps)) == 3


def test_the_burstgpt_layout_without_its_failed_requests(tmp_path: Path) -> None:
    trace = read(tmp_path, BURST)
    rows = [row for step in range(trace.num_steps) for row in trace.arrivals(step).answers.tolist()]
    assert rows == [18, 230, 374]
    assert trace.arrivals(40).prompts.tolist() == [1087]


def test_a_byte_order_mark_and_empty_lines_do_no_harm(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeff" + AZURE + "\n\n").num_steps == 125


def test_a_trace_is_scaled_by_what_each_row_stands_for(tmp_path: Path) -> None:
    trace = read(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i},10,10\n" for i in range(600)))
    assert trace.rate(300) == pytest.approx(1.0)
    weight = scaled(trace, 250.0)
    assert weight == 250
    assert trace.weighted(weight).rate(300) == pytest.approx(250.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no columns"),
        ("a,b\n1,2\n", "has no columns TIMESTAMP,ContextTokens,GeneratedTokens or Timestamp,Request tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\nyesterday,5,6\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", "line 2: a negative number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,2,3\n", "line 2: 'nan' is no time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,2,3\n9e9,2,3\n", "more than 31"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, text)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(str(tmp_path / "nothing.csv"), step_s=1)
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(str(tmp_path / "binary.csv"), step_s=1)


def test_rows_are_cut_to_what_a_worker_holds(tmp_path: Path) -> None:
    trace = read(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n0,90000000,50\n1,100,90000000\n").within(4096)
    assert trace.arrivals(0).prompts.tolist() == [4095] and trace.arrivals(0).answers.tolist() == [1]
    assert trace.arrivals(1).prompts.tolist() == [100] and trace.arrivals(1).answers.tolist() == [3996]
    assert trace.max_answer == 3996


@pytest.mark.parametrize("row", ["0,-1,5", "0,5,-1", f"0,{10**30},5", f"0,5,{10**30}"])
def test_numbers_that_no_request_has_are_refused_with_their_line(tmp_path: Path, row: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
