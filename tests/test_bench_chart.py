"""The picture of what the bench measured."""

from bench_runs import TINY, parse

from absl_apps import bench, bench_chart


def test_a_sweep_and_its_picture(tmp_path, monkeypatch):
    drawn = []
    figure = bench_chart.figure
    monkeypatch.setattr(
        bench_chart, "figure", lambda *args: drawn.append(figure(*args)) or drawn[0]
    )
    path = tmp_path / "bench.png"
    args = ("--contenders=naive,limit,gradaccum", "--sweep=1,4,8", "--noprogram_size")
    results = bench.bench(parse(*TINY, *args, f"--png={path}"))
    assert list(results["sweep"]) == [1, 4, 8]
    assert results["sweep"][4] is results["contenders"]  # not measured again
    assert results["sweep"][8]["naive"]["all_reduces"] == 8 * (2 + 1)
    assert path.read_bytes().startswith(b"\x89PNG")
    bars, time, memory = drawn[0].axes
    assert [text.get_text() for text in bars.get_yticklabels()] == ["naive", "limit", "gradaccum"]
    assert [bar.get_width() for bar in bars.patches] == [
        row["median_seconds"] for row in results["contenders"].values()
    ]
    for axes, key in (time, "median_seconds"), (memory, "temp_gradient_trees"):
        lines = {line.get_label(): line for line in axes.get_lines()}
        for name, line in lines.items():
            assert list(line.get_xdata()) == [1, 4, 8]
            assert list(line.get_ydata()) == [rows[name][key] for rows in results["sweep"].values()]
    assert all([bars.get_xlabel(), time.get_ylabel(), memory.get_xlabel()])


def test_a_picture_of_what_was_only_compiled():
    rows = {"gradaccum": {"median_seconds": None, "temp_gradient_trees": 1.0}}
    bars, time, memory = bench_chart.figure(rows, {1: rows, 2: rows}, "compiled").axes
    assert bars.texts[0].get_text() == "nothing ran: not measured"
    assert len(time.get_lines()[0].get_xdata()) == 0
    assert list(memory.get_lines()[0].get_ydata()) == [1.0, 1.0]
