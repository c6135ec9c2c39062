"""Machines of a Ray cluster come and go, and every row and every unit of work is done once, as one process does it."""

import json
import os
import threading
import time

import pyarrow as pa
import pytest
from datasets import load_from_disk

import hf_lossy_assist as hla


os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}  # read when Ray is imported
ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]
NODE = {"num_cpus": 1, "object_store_memory": 100_000_000}
SETTINGS = {"policy": "svip", "max_new_tokens": 24, "max_rows": 2, "do_sample": True, "seed": 3}


@pytest.fixture(scope="module")
def cluster():
    """One node; `connected` adds two."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    found = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def connected(cluster):
    while len(cluster.list_all_nodes()) < 3:
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()


def replace_a_node(cluster):
    """Kill the processes of the node that was added last (SIGKILL), and add a node."""
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    cluster.add_node(**NODE)


@pytest.mark.nightly
def test_rows_of_a_dataset_while_a_node_dies_and_another_joins(connected):
    import ray.data

    from hf_lossy_assist.ray import Writer

    rows = [{"id": n, "prompt": problem.prompt} for n, problem in enumerate(hla.demo.problems(24, seed=7))]
    rows[5]["prompt"] = ""
    compute, settings = ray.data.ActorPoolStrategy(size=3), {"batch_size": 2, "batch_format": "pyarrow"}
    written = ray.data.from_items(rows, override_num_blocks=12)
    written = written.map_batches(Writer, fn_constructor_kwargs=SETTINGS, compute=compute, **settings)
    found = []
    for block in written.iter_batches(batch_size=None, batch_format="pyarrow"):
        if not found:
            replace_a_node(connected)
        found += block.to_pylist()
    alone = Writer(**SETTINGS)(pa.Table.from_pylist(rows)).to_pylist()
    assert sorted(found, key=lambda row: row["id"]) == alone
    assert [row["id"] for row in alone if row["error"]] == [5]


@pytest.mark.nightly
def test_units_of_mining_while_a_node_dies_and_another_joins(connected, hf_lossy, tmp_path):
    command = ("mine", "--task", "demo", "--limit", 9, "--max-new-tokens", 80, "--batch-size", 2, "--out")
    assert hf_lossy(*command, tmp_path / "alone").code == 0
    done, part, words = [], tmp_path / "found.partial", (*command, tmp_path / "found", "--ray", "auto")
    job = threading.Thread(target=lambda: done.append(hf_lossy(*words)), daemon=True)
    job.start()
    while job.is_alive() and not list(part.glob("[0-9]*.json")):
        time.sleep(0.05)
    replace_a_node(connected)  # Ray starts nodes in the main thread alone
    job.join()
    assert done[0].code == 0, done[0].err
    alone, found = (load_from_disk(str(tmp_path / name)).to_list() for name in ("alone", "found"))
    assert alone == found and len(alone) > 5


def test_parts_of_texts(cluster, hf_lossy, tmp_path):
    """In the order of the prompts, by whichever worker; what is there is not written again; a line that is no JSON has an error."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": problem.prompt}) for problem in hla.demo.problems(40, seed=7)]
    prompts.write_text("\n".join([*lines[:3], "{", *lines[4:]]) + "\n")
    command = ("generate", "--prompts", prompts, "--max-new-tokens", 6, "--batch-size", 4, "--do-sample", "--out")
    assert hf_lossy(*command, tmp_path / "alone").code == 0
    found = tmp_path / "found"
    done = hf_lossy(*command, found, "--ray", cluster.address)
    assert done.code == 0, done.err
    alone, files = (
        [(folder / f"0000{n}.jsonl").read_text() for n in range(2)] for folder in (tmp_path / "alone", found)
    )
    assert files == alone
    rows = [json.loads(line) for text in files for line in text.splitlines()]
    assert [row["id"] for row in rows] == list(range(40)) and [row["id"] for row in rows if row["error"]] == [3]


@pytest.mark.nightly
def test_what_is_compared(connected, hf_lossy, tmp_path):
    """All but the seconds is one process's; the machine is that of the workers."""
    command = ("compare", "--limit", 5, "--max-new-tokens", 16, "--no-static", "--batch-size", "1,2", "--out")
    drafts = ("--assistant", "demo", "--assistant", "suffix", "--policies", "strict,svip")  # no clock decides
    found = {}
    for name, more in (("alone", ()), ("cluster", ("--ray", "auto"))):
        done = hf_lossy(*command, tmp_path / name, *drafts, *more)
        assert done.code == 0, done.err
        lines = [json.loads(line) for line in (tmp_path / name / "answers.jsonl").read_text().splitlines()]
        fields = ("token_ids", "right", "num_accepted_draft_tokens", "target_calls")
        found[name] = {(line["batch_size"], line["arm"], line["prompt"]): [line[f] for f in fields] for line in lines}
    assert found["alone"] == found["cluster"]
    assert json.loads((tmp_path / "cluster" / "run.json").read_text())["machine"].endswith(", 1 threads")


@pytest.mark.nightly
def test_a_worker_that_cannot_work_is_named_and_a_unit_that_ends_its_workers_ends_the_job(connected):
    """With models that the job sends; once tried six times. The other units are written, with which `--resume` goes on."""
    from hf_lossy_assist.ray import Workers
    from hf_lossy_assist.server.named_drafters import load_pair

    def work(models, numbers, tell):
        for number in numbers:
            if number == 2:
                os._exit(7)
            if number == 7:
                raise ValueError(f"{models[0].config.name_or_path} cannot do unit {number}")
            yield number, number**2

    models, written = load_pair(None, None, "auto", "cpu"), {}
    for units, words in (
        ([7], r"^worker \d+ on [\d.]+: demo-target cannot do unit 7$"),
        (range(4), "^Ray ended the job: "),
    ):
        with pytest.raises(ValueError, match=words):
            Workers().run(work, models, units, written.__setitem__, ("writing", "parts"))
    assert written.items() <= {0: 0, 1: 1, 3: 9}.items()
