"""The commit that a run's source is of."""

import subprocess

import numpy as np

from absl_apps.environment import commit, distributions


def git(directory, *arguments):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(directory)]
    done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_the_source(tmp_path, monkeypatch):
    package = tmp_path / "gradaccum"
    package.mkdir()
    (package / "__init__.py").touch()
    assert commit(str(package)) is None  # no repository
    git(tmp_path, "init", "-q")
    (tmp_path / "README").touch()
    git(tmp_path, "add", "README")
    git(tmp_path, "commit", "-qm", "another project's")
    assert commit(str(package)) is None  # installed into a repository, no part of it
    git(tmp_path, "add", "gradaccum")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40
    assert commit(str(package)) == head
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.json").touch()  # what a run leaves changes no source
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as a git hook sets it
    assert commit(str(package)) == head
    (package / "new.py").touch()
    assert commit(str(package)) == f"{head}-dirty"
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("x = 1")
    assert commit(str(package)) == f"{head}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(str(package)) is None  # no git


def test_a_vendored_package_is_not_the_repository_s(tmp_path):
    package = tmp_path / "vendored" / "gradaccum"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a monorepo")
    assert commit(str(package)) is None


def test_versions_of_what_is_installed_and_of_what_is_not():
    found = distributions("numpy", "no-such-thing")
    assert found == {"numpy": np.__version__, "no-such-thing": None}
