"""The Grafana dashboard matches the published schema of the Grafana version that compose.yaml pins.

Grafana itself does not run. The TypeScript compiler finds unknown fields and invalid values.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docker.engine import ASKED_FOR, ROOT
from tests.docker.test_monitoring import DASHBOARD, DOCKER, PANELS

SCHEMA = "./node_modules/@grafana/schema/dist/esm"
TSC = ROOT / "dashboard" / "node_modules" / ".bin" / "tsc"
OPTIONS = {
    "stat": "StatPanelCfg",
    "timeseries": "TimeSeriesPanelCfg",
    "state-timeline": "StateTimelinePanelCfg",
    "table": "TablePanelCfg",
}
# In JSON, enums are words, and keys with a default are optional. The keys of queries and annotations belong to the
# data source.
TYPES = """
import type { Dashboard, DataQuery } from "@grafana/schema";
type Plain<T> = unknown extends T ? T : T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
    : T extends (infer U)[] ? Plain<U>[] : T extends object ? { [K in keyof T]?: Plain<T[K]> } : T;
type Query = Plain<DataQuery> & { expr: string; legendFormat?: string; instant?: boolean; range?: boolean;
    format?: "table" | "time_series" };
type Marks = NonNullable<NonNullable<Plain<Dashboard>["annotations"]>["list"]>[number];
type Annotation = Omit<Marks, "target"> & { target: Query; titleFormat?: string; textFormat?: string };
"""


def as_typescript() -> str:
    lines = [TYPES]
    for kind, module in OPTIONS.items():
        name = kind.replace("-", "")
        lines.append(f'import type * as {name} from "{SCHEMA}/raw/composable/{name}/panelcfg/x/{module}_types.gen";')
    checked: list[tuple[str, object]] = []
    for panel in PANELS:
        kind, usual = panel["type"].replace("-", ""), panel["fieldConfig"]["defaults"]
        checked.append((f"Plain<{kind}.Options>", panel["options"]))
        checked += [("Query", target) for target in panel["targets"]]
        checked += [(f"Plain<{kind}.FieldConfig>", usual["custom"])] if "custom" in usual else []
    checked += [("Annotation", annotation) for annotation in DASHBOARD["annotations"]["list"]]
    checked.append(("Plain<Dashboard>", {**DASHBOARD, "annotations": {"list": []}}))
    lines += [f"export const c{i}: {kind} = {json.dumps(value)};" for i, (kind, value) in enumerate(checked)]
    return "\n".join(lines) + "\n"


def faults(folder: Path, text: str) -> str:
    (folder / "dashboard.ts").write_text(text, encoding="utf-8")
    words = "--noEmit --strict --skipLibCheck --module esnext --moduleResolution bundler --target es2022 dashboard.ts"
    done = subprocess.run(
        [TSC, *words.split()], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert (done.returncode == 0) == (not done.stdout), done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not os.environ.get(ASKED_FOR), reason="part of `make test-docker`, as it fetches Grafana's schema")
def test_grafana_dashboard_matches_the_schema_published_by_grafana(tmp_path: Path) -> None:
    if not (shutil.which("npm") and TSC.exists()):
        pytest.skip("npm and the dashboard's packages are not installed (make dashboard)")
    image = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]["grafana"]["image"]
    (version,) = re.findall(r":([\d.]+)}$", image)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"@grafana/schema@{version}"]
    (tmp_path / "package.json").write_text("{}")
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = as_typescript()
    assert faults(tmp_path, text) == ""
    # The check fails for an unknown key and for an invalid value.
    for right, wrong in (('"lineWidth"', '"linewidth"'), ('"showPoints": "never"', '"showPoints": "no"')):
        assert right in text
        assert "dashboard.ts" in faults(tmp_path, text.replace(right, wrong, 1))
