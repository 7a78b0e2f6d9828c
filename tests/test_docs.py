"""Every public name is documented with its Cost, and every example in the documentation runs."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import gradaccum

ROOT = pathlib.Path(__file__).parent.parent
MODULES = ["gradaccum"] + [
    m.name for m in pkgutil.walk_packages(gradaccum.__path__, prefix="gradaccum.")
]


def public_names():
    modules = [m for m in MODULES if not any(part.startswith("_") for part in m.split("."))]
    for module in map(importlib.import_module, modules):
        for name, value in vars(module).items():
            if not name.startswith("_") and (inspect.isroutine(value) or inspect.isclass(value)):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("value", list(public_names()))
def test_public_names_are_documented(value):
    text = inspect.getdoc(value)
    assert text
    assert re.match(r"[A-Z].*[.]$", text.split("\n")[0]), text.split("\n")[0]
    if inspect.isroutine(value):
        for section in ("Args:", "Raises:", "Cost:", "Example:"):
            assert section in text, f"{value.__name__} has no section {section}"
        arguments = re.search(r"Args:\n(.*?)\n\n", text, flags=re.S)[1]
        for name in inspect.signature(value).parameters:
            assert re.search(rf"\b{name}\b.*:", arguments), f"{name} of {value.__name__}"


def routines():
    """Yields name and value of every public function, class and method, once."""
    values = {id(param.values[0]): param.values[0] for param in public_names()}.values()
    for value in values:
        yield value.__name__, value
        for name, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isroutine(method) and not name.startswith("_"):
                yield f"{value.__name__}.{name}", method


def misnamed(value):
    """Returns the arguments that a docstring names and the signature lacks, or which it omits."""
    section = re.search(r"Args:\n(.*?)(\n\n|$)", inspect.getdoc(value) or "", flags=re.S)
    if not section:
        return set()
    named = re.findall(r"^  ([\w*]+(?:, [\w*]+)*):", section[1], re.M)
    parameters = inspect.signature(value).parameters.values()
    wanted = {str(p.replace(annotation=p.empty, default=p.empty)) for p in parameters} - {"self"}
    return wanted ^ {name for names in named for name in names.split(", ")}


def test_o20_every_argument_that_is_documented_exists():
    found = dict(routines())
    assert len(found) > 50
    assert not {name: wrong for name, value in found.items() if (wrong := misnamed(value))}


def test_o20_an_argument_that_does_not_exist_is_found():
    def scale(x, factor, **rest):
        """Scale.

        Args:
          x, by: numbers.
          **rest: is not looked at.
        """

    assert misnamed(scale) == {"by", "factor"}


WITH_EXAMPLES = [
    name
    for name in MODULES
    if any(t.examples for t in doctest.DocTestFinder().find(importlib.import_module(name)))
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_readmes_blocks_run_one_after_the_other():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(blocks) >= 3
    names = {"__name__": "readme"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {number}", "exec"), names)


def test_the_readme_fits():
    assert (ROOT / "README.md").read_text().count("\n") <= 150


def test_importing_has_no_side_effect():
    import subprocess
    import sys

    code = (
        "import os, jax; before = dict(os.environ), dict(jax.config.values)\n"
        "import gradaccum, gradaccum.audit\n"
        "assert (dict(os.environ), dict(jax.config.values)) == before\n"
        "import absl.flags; assert 'mesh' not in absl.flags.FLAGS\n"
        "jax.config.update('jax_num_cpu_devices', 3)  # raises after a device query\n"
        "jax.config.update('jax_platforms', 'cpu'); assert jax.device_count() == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_the_readmes_two_lines_change_multisteps_and_nothing_else():
    text = (ROOT / "README.md").read_text()
    diff = next(d for d in re.findall(r"```diff\n(.*?)```", text, flags=re.S) if "MultiSteps" in d)
    before, after = ([s[1:] for s in diff.splitlines() if s[0] == sign] for sign in "-+")
    assert len(before) == len(after) == 2
    mesh = jax.make_mesh((8,), ("dp",))
    trained = []
    for lines in (before, after):
        names = {"jax": jax, "optax": optax, "gradaccum": gradaccum, "mesh": mesh}
        names["loss_fn"] = lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2)
        exec("\n".join(lines), names)
        grad_fn, tx = names["grad_fn"], names["tx"]

        @jax.jit
        def train_step(params, opt_state, batch, grad_fn=grad_fn, tx=tx):
            _, grads = grad_fn(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = {"w": jnp.ones((3,))}
        opt_state = tx.init(params)
        for call in range(16):
            batch = jax.random.normal(jax.random.key(call), (16, 3))
            params, opt_state = train_step(params, opt_state, batch)
        trained.append(params)
    assert float(jnp.max(jnp.abs(trained[0]["w"] - 1))) > 1e-4
    helpers.assert_close(trained[1], trained[0], within=1e-6)
