"""A JupyterLab of its own for the tests: own settings, own port, no news, no token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
FOLDERS = (
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
    "IPYTHONDIR",
)
READY = """async (name) => {
  const app = window.jupyterapp;
  await app.commands.execute("docmanager:open", { path: name, factory: "Notebook" });
  const panel = () => [...app.shell.widgets("main")].find((w) => w.context?.path === name);
  for (let i = 0; i < 600; i++) {
    const session = panel()?.sessionContext;
    if (session) {
      await session.ready;
      const kernel = session.session?.kernel;
      if (kernel?.connectionStatus === "connected" && kernel.status === "idle") return true;
    }
    await new Promise((done) => setTimeout(done, 100));
  }
  return false;
}"""


class Lab:
    """A server, and what a test does with it through one browser page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTERLAB_SETTINGS_DIR": ""}
        for name in FOLDERS:
            path = folder / name.lower()
            path.mkdir()
            environment[name] = str(path)
        for name, settings in SETTINGS.items():
            path = folder / "jupyterlab_settings_dir" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))
        self.log = (folder / "lab.log").open("w")
        self.server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyterlab",
                "--no-browser",
                "--allow-root",
                f"--ServerApp.port={self.port}",
                "--ServerApp.port_retries=0",
                f"--ServerApp.root_dir={self.notebooks}",
                "--IdentityProvider.token=",
                "--LabApp.expose_app_in_browser=True",
                "--ServerApp.open_browser=False",
            ],
            env=environment,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/lab?reset"

    def wait(self, seconds: float = 90) -> None:
        """Until the server answers.

        Raises:
            RuntimeError: it ended, or did not answer in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.server.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api", timeout=2).read()
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError((self.folder / "lab.log").read_text()[-2000:])

    def close(self) -> None:
        self.server.terminate()
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            self.server.kill()
        self.log.close()

    # -- notebooks ----------------------------------------------------------------------------

    def write(self, name: str, cells: list[str]) -> Path:
        return self.write_book(name, [nbformat.v4.new_code_cell(text) for text in cells])

    def write_book(self, name: str, cells: list[Any]) -> Path:
        """Cells with their outputs. With a kernel named, or Lab would ask for one."""
        book = nbformat.v4.new_notebook(cells=cells)
        book.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        path = self.notebooks / name
        nbformat.write(book, path)
        return path


class LabPage:
    """One page for all tests; a kernel a notebook, shut down afterwards."""

    def __init__(self, page: Any, lab: Lab) -> None:
        self.page = page
        self.lab = lab
        self.name = ""

    def open(self, name: str, cells: list[str]) -> None:
        self.lab.write(name, cells)
        self.open_saved(name)

    def open_saved(self, name: str) -> None:
        """Open a notebook that lies in the folder; wait for its kernel."""
        self.name = name
        assert self.page.evaluate(READY, name), "no kernel"

    def run_all(self, wait: bool = True) -> None:
        command = "window.jupyterapp.commands.execute('notebook:run-all-cells')"
        if wait:
            self.page.evaluate(f"async () => {{ await {command}; }}")
        else:
            self.page.evaluate(
                "() => { window.ranAll = false; "
                f"{command}.then(() => {{ window.ranAll = true; }}); }}"
            )

    def run_cell(self, index: int) -> None:
        self.page.evaluate(
            """async (index) => {
              const app = window.jupyterapp;
              app.shell.currentWidget.content.activeCellIndex = index;
              await app.commands.execute("notebook:run-cell");
            }""",
            index,
        )

    def output(self, index: int) -> str:
        """The text of a cell's outputs."""
        return self.page.evaluate(
            """(index) => window.jupyterapp.shell.currentWidget.content.widgets[index]
              .outputArea.node.textContent""",
            index,
        )

    def kernel(self, code: str) -> str:
        """Run code in the notebook's kernel, without a cell; what it prints."""
        return self.page.evaluate(
            """async (code) => {
              const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
              let text = "";
              const future = kernel.requestExecute({ code, store_history: false });
              future.onIOPub = (msg) => {
                if (msg.header.msg_type === "stream") text += msg.content.text;
                if (msg.header.msg_type === "error") text += msg.content.evalue;
              };
              await future.done;
              return text;
            }""",
            code,
        )

    def save(self) -> Path:
        command = "window.jupyterapp.commands.execute('docmanager:save')"
        self.page.evaluate(f"async () => {{ await {command}; }}")
        return self.lab.notebooks / self.name

    def close_notebook(self) -> None:
        if self.name:
            self.page.evaluate(
                """async () => {
                  const panel = window.jupyterapp.shell.currentWidget;
                  if (!panel) return;
                  await panel.sessionContext.shutdown();
                  await panel.context.save(); // or it would ask
                  panel.dispose();
                }"""
            )
            self.name = ""
