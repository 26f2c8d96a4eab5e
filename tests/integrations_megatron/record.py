"""Writes ``recorded/``: what real Megatron says about each case. Run with an interpreter that has Megatron, after a change of
versions: ``.venv-megatron/bin/python tests/integrations_megatron/record.py [case ...]``."""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from megatron_cases import CASES, RECORDED, write_case_checkpoint
from test_bridge import run_ranks

for name in sys.argv[1:] or CASES:
    with tempfile.TemporaryDirectory() as directory:
        write_case_checkpoint(CASES[name], Path(directory) / "checkpoint")
        ranks, summaries = run_ranks(name, Path(directory))
        lines = [
            "[\n  " + ",\n  ".join(json.dumps(entry, separators=(",", ":")) for entry in rank["facts"]) + "\n ]"
            for rank in ranks
        ]
        manifest = json.dumps(ranks[0]["manifest"], separators=(",", ":"))
        text = '{"manifest":' + manifest + ',\n "ranks":[' + ",".join(lines) + "]}\n"
        (RECORDED / f"{name}.json").write_text(text)
        sys.stdout.write(f"{name}: {len(text)} bytes, {summaries[0]}\n")
