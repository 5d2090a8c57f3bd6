"""The set-up behind `make env`: every reason to stop, and what it leaves alone."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / 'tools' / 'setup_env'


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def setup_env():
    """The modules of tools/setup_env, which is run as a script and so is no package."""
    sys.path.insert(0, str(TOOLS))
    try:
        return load('setup_env_main', TOOLS / '__main__.py')
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def machine(setup_env):
    return sys.modules['machine']


@pytest.fixture
def mmcv_wheel(setup_env):
    return setup_env.mmcv_wheel


@pytest.fixture
def env(setup_env, tmp_path):
    """An environment whose Python is the one that runs the tests."""
    path = tmp_path / 'env'
    path.mkdir()
    env = setup_env.Environment(path, 'onedl', setup_env.Progress(7))
    env.python = Path(sys.executable)
    return env


# ------------------------------------------------------------------------------- reasons to stop
def test_unknown_line_ends_in_one_sentence(tmp_path):
    result = subprocess.run(
        [sys.executable, TOOLS, '--line', 'pip', '--venv', tmp_path / 'env'],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr == 'error: LINE=pip is unknown, it has to be one of onedl, upstream\n'
    assert not (tmp_path / 'env').exists()


def test_wrong_python(machine, setup_env, monkeypatch):
    monkeypatch.setattr(machine, 'THIS_PYTHON', '3.8')
    with pytest.raises(setup_env.SetupError, match=r'is not supported.*3\.11.*PYTHON=path'):
        machine.check_python()


def test_python_that_cannot_create_environments(machine, setup_env, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, 'find_spec', lambda name: None if name == 'ensurepip' else find(name)
    )
    with pytest.raises(setup_env.SetupError, match='apt install python3.*-venv'):
        machine.check_python()


@pytest.mark.parametrize(
    'compiler, cause', [('no-such-compiler', 'No such file'), ('false', 'does not work')]
)
def test_no_working_compiler(machine, setup_env, monkeypatch, compiler, cause):
    monkeypatch.setenv('CXX', compiler)
    with pytest.raises(setup_env.SetupError, match=f'{compiler}.*{cause}.*apt install g'):
        machine.check_compiler()


def test_missing_headers_of_python(machine, setup_env, monkeypatch, tmp_path):
    monkeypatch.setattr(machine.sysconfig, 'get_path', lambda name: str(tmp_path))
    with pytest.raises(setup_env.SetupError, match='apt install python3.*-dev'):
        machine.check_compiler()


def test_too_little_disk(machine, setup_env, env, monkeypatch, tmp_path):
    usage = namedtuple('usage', 'free')(machine.ENVIRONMENT_SPACE - 1)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
    with pytest.raises(setup_env.SetupError, match=r'4\.0 GB are needed.*VENV=path'):
        machine.check_space(env, tmp_path / 'cache')
    # With torch in the environment already, less is needed.
    (env.path / 'lib/python3.11/site-packages/torch-2.13.0.dist-info').mkdir(parents=True)
    machine.check_space(env, tmp_path / 'cache')


def test_folder_that_is_no_environment_is_left_alone(setup_env, env):
    (env.path / 'thesis.tex').write_text('years of work')
    env.python = env.path / 'bin' / 'python'
    with pytest.raises(setup_env.SetupError, match='no working Python environment'):
        setup_env.create(env)
    assert (env.path / 'thesis.tex').read_text() == 'years of work'


def test_nothing_is_installed_into_a_whole_python(setup_env, env):
    with pytest.raises(setup_env.SetupError, match='-m venv PATH and give VENV=PATH'):
        setup_env.create(env)  # there is no pyvenv.cfg in its folder


def test_environment_without_pip_is_completed(setup_env, env):
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', env.path], check=True)
    (env.path / 'kept').touch()
    env.python = env.path / 'bin' / 'python'
    setup_env.create(env)
    assert env.ask('import pip').returncode == 0
    assert (env.path / 'kept').exists()


def test_lines_do_not_mix(setup_env, env):
    with pytest.raises(setup_env.SetupError, match='holds mmdet 3.3.0 of the upstream line'):
        setup_env.refuse_other_line(env, {'torch': '2.13.0', 'mmdet': '3.3.0'})
    setup_env.refuse_other_line(env, {'torch': '2.13.0', 'onedl-mmcv': '2.3.6'})


def test_error_of_the_system_ends_in_one_sentence(setup_env, monkeypatch, capsys):
    def fail(line, path):
        raise PermissionError(13, 'Permission denied', '/cache')

    monkeypatch.setattr(setup_env, 'set_up', fail)
    monkeypatch.setattr(sys, 'argv', ['setup_env'])
    assert setup_env.main() == 1
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: '/cache'\n"


def test_failing_command_shows_its_end_and_its_log(setup_env, env, capsys):
    with pytest.raises(setup_env.SetupError, match=f'installing x failed.*{env.log}'):
        env.run('sh', '-c', 'seq 100; echo because; exit 3', what='installing x')
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == 'because'
    assert len(shown) == 15
    with pytest.raises(setup_env.SetupError, match='the disk is full'):
        env.run('sh', '-c', 'echo "OSError: No space left on device"; false', what='pip')
    assert env.run('false', what='x', check=False) is False


def test_interrupt_ends_the_compilers_too(setup_env, env, monkeypatch):
    children = env.path / 'children'

    def interrupt(text):
        if children.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(env.progress, 'interval', 0)
    monkeypatch.setattr(env.progress, 'beat', interrupt)
    script = f'sleep 600 & echo $! > {children}.new; mv {children}.new {children}; wait'
    with pytest.raises(KeyboardInterrupt):
        env.run('sh', '-c', script, what='compiling')
    child = Path('/proc', children.read_text().strip(), 'stat')
    deadline = time.monotonic() + 60
    while child.exists() and ') Z' not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or ') Z' in child.read_text()


# ------------------------------------------------------------------------------------------ pins
@pytest.mark.parametrize(
    'installed, torch, torchvision',
    [
        ({}, 'torch==2.13.0', 'torchvision==0.28.0'),
        ({'torch': '2.13.0+cu130'}, 'torch==2.13.0+cu130', 'torchvision==0.28.0'),
        ({'torch': '2.8.0+cu128'}, 'torch==2.8.0+cu128', None),
        ({'torch': '2.8.0', 'torchvision': '0.23.0'}, 'torch==2.8.0', 'torchvision==0.23.0'),
    ],
)
def test_installed_torch_stays(setup_env, env, monkeypatch, installed, torch, torchvision):
    monkeypatch.setattr(env, 'installed', lambda: installed)
    setup_env.write_constraints(env)
    lines = env.constraints.read_text().splitlines()
    assert [line for line in lines if line.startswith('torch==')] == [torch]
    expected = [torchvision] if torchvision else []
    assert [line for line in lines if line.startswith('torchvision==')] == expected
    assert any(line.startswith('numpy==') for line in lines)


def test_triton_is_not_constrained(setup_env):
    # CUDA builds of torch require a Triton of their own, and pip would refuse both.
    assert 'triton' not in setup_env.pins('constraints.txt')


@pytest.mark.parametrize('line', ['onedl', 'upstream'])
def test_both_lines_pin_all_packages(setup_env, line):
    names = ' '.join(setup_env.pins(f'{line}.txt'))
    for name in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain'):
        assert name in names


# --------------------------------------------------------------------------------- wheel of mmcv
def wheel(folder, files, name='onedl_mmcv-2.3.6-cp311-cp311-linux_x86_64.whl'):
    path = folder / name
    with zipfile.ZipFile(path, 'w') as archive:
        for file in files:
            archive.writestr(file, b'not a library')
    return path


def test_wheel_without_operators_is_not_used(mmcv_wheel, env, tmp_path):
    assert 'no compiled operators' in mmcv_wheel.fault(env, wheel(tmp_path, ['mmcv/ops/nms.py']))


def test_wheel_whose_operators_do_not_load_is_not_used(mmcv_wheel, env, tmp_path):
    path = wheel(tmp_path, ['mmcv/_ext.cpython-311-x86_64-linux-gnu.so'])
    assert 'do not load' in mmcv_wheel.fault(env, path)


def test_damaged_wheel_leaves_the_cache(mmcv_wheel, env, tmp_path):
    path = tmp_path / 'onedl_mmcv-2.3.6-cp311-cp311-linux_x86_64.whl'
    path.write_bytes(b'half a download')
    assert mmcv_wheel.cached(env, tmp_path) is None
    assert not path.exists()


def test_cached_wheel_is_used(mmcv_wheel, env, tmp_path, monkeypatch):
    monkeypatch.setattr(mmcv_wheel, 'fault', lambda env, wheel: None)
    wheel(tmp_path, [], 'onedl_mmcv-2.3.5-cp311-cp311-linux_x86_64.whl')
    wheel(tmp_path, [], 'mmcv-2.1.0-cp311-cp311-linux_x86_64.whl')
    assert mmcv_wheel.cached(env, tmp_path) is None
    path = wheel(tmp_path, [])
    assert mmcv_wheel.cached(env, tmp_path) == path


def test_built_wheel_is_kept_and_installed(mmcv_wheel, setup_env, env, tmp_path, monkeypatch):
    calls = []

    def pip(*arguments, what, check=True, **variables):
        calls.append((arguments, variables))
        if arguments[0] == 'wheel':
            wheel(arguments[arguments.index('--wheel-dir') + 1], [])

    torch = {'version': '2.13.0', 'python': 'cp311', 'machine': 'x86_64', 'cuda_available': False}
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(env, 'pip', pip)
    monkeypatch.setattr(env, 'installed', dict)
    monkeypatch.setattr(mmcv_wheel, 'describe_torch', lambda env: torch)
    monkeypatch.setattr(mmcv_wheel, 'check_compiler', lambda: None)
    monkeypatch.setattr(mmcv_wheel, 'fault', lambda env, wheel: 'it holds no operators')
    with pytest.raises(setup_env.SetupError, match='was built, but it holds no operators'):
        mmcv_wheel.provide(env)
    assert not list(mmcv_wheel.cache_root().rglob('*.whl'))

    calls.clear()
    monkeypatch.setattr(mmcv_wheel, 'fault', lambda env, wheel: None)
    mmcv_wheel.provide(env)
    (kept,) = mmcv_wheel.cache_root().rglob('*.whl')
    look, build, install = calls
    assert '--no-index' in look[0]
    # Any of these forgotten gives a wheel without operators.
    assert {'--no-build-isolation', '--no-cache-dir', '--no-binary'} <= set(build[0])
    assert build[1]['MMCV_WITH_OPS'] == '1'
    assert kept in install[0]
    calls.clear()
    mmcv_wheel.provide(env)
    assert [arguments[0] for arguments, _ in calls] == ['install']


def test_gpu_without_its_compiler(mmcv_wheel, setup_env, env, tmp_path):
    torch = {'cuda_available': True, 'cuda_home': None, 'cuda': '13.0'}
    with pytest.raises(setup_env.SetupError, match=r'CUDA 13\.0 toolkit.*CUDA_HOME'):
        mmcv_wheel.build(env, tmp_path, torch)


def test_cache_key_tells_builds_apart(mmcv_wheel, monkeypatch):
    monkeypatch.delenv('TORCH_CUDA_ARCH_LIST', raising=False)
    monkeypatch.delenv('FORCE_CUDA', raising=False)
    base = {'version': '2.13.0+cpu', 'python': 'cp311', 'machine': 'x86_64'}
    base |= {'cuda_available': False, 'capability': None}
    gpu = {**base, 'version': '2.13.0+cu130', 'cuda_available': True, 'capability': [9, 0]}
    keys = [
        mmcv_wheel.cache_key(torch)
        for torch in (base, {**base, 'python': 'cp312'}, gpu, {**gpu, 'capability': [8, 0]})
    ]
    assert keys[0] == 'torch-2.13.0+cpu-cp311-x86_64'
    assert len(set(keys)) == 4
    assert not [key for key in keys if re.search(r'[^\w.+-]', key)]


# ------------------------------------------------------------------------------------ idempotent
def test_steps_run_once_until_something_changes(setup_env, monkeypatch, tmp_path, capsys):
    ran = []

    def create(env):
        ran.append('create')
        env.python.parent.mkdir(parents=True, exist_ok=True)
        env.python.touch()

    monkeypatch.setattr(setup_env, 'create', create)
    for name in ('check_machine', 'install_torch', 'install_packages', 'fix_torchvision'):
        monkeypatch.setattr(setup_env, name, lambda env, name=name: ran.append(name))
    monkeypatch.setattr(setup_env.mmcv_wheel, 'provide', lambda env: ran.append('provide'))

    def interrupted(env):
        raise setup_env.SetupError('pip check failed')

    monkeypatch.setattr(setup_env, 'verify', interrupted)
    with pytest.raises(setup_env.SetupError):
        setup_env.set_up('onedl', tmp_path / 'env')
    assert len(ran) == 6
    monkeypatch.setattr(setup_env, 'verify', lambda env: ran.append('verify'))
    setup_env.set_up('onedl', tmp_path / 'env')  # goes on after the failure
    assert len(ran) == 13
    setup_env.set_up('onedl', tmp_path / 'env')
    assert len(ran) == 13
    assert capsys.readouterr().out.endswith('is ready (onedl line)\n')
    # A package that was installed by hand since may have changed what was pinned.
    (tmp_path / 'env/lib/python3.11/site-packages/numpy-2.4.0.dist-info').mkdir(parents=True)
    setup_env.set_up('onedl', tmp_path / 'env')
    assert len(ran) == 20


# ----------------------------------------------------------------------------------- torchvision
@pytest.mark.parametrize(
    'version, expected', [('0.28.0+cu130', True), ('0.28.0+cpu', False), ('0.28.0', False)]
)
def test_only_a_cuda_build_of_torchvision_is_helped(monkeypatch, tmp_path, version, expected):
    shim = load('shim', TOOLS / 'torchvision_cpu' / 'torchvision_cpu_schemas.py')
    (tmp_path / 'version.py').write_text(f"__version__ = '{version}'\n")
    spec = namedtuple('Spec', 'submodule_search_locations')([str(tmp_path)])
    monkeypatch.setattr(shim.importlib.util, 'find_spec', lambda name: spec)
    assert shim.torchvision_is_cuda_build() is expected
    monkeypatch.setattr(shim.importlib.util, 'find_spec', lambda name: None)
    assert shim.torchvision_is_cuda_build() is False


def test_torchvision_is_mended_only_where_its_operators_are_missing(setup_env, env, monkeypatch):
    answers = []
    monkeypatch.setattr(env, 'ask', lambda code: answers.pop(0))
    installs = []
    monkeypatch.setattr(env, 'pip', lambda *args, what: installs.append(what))
    done = subprocess.CompletedProcess
    works = done([], 0, '', '')
    missing = done([], 1, '', 'RuntimeError: operator torchvision::nms does not exist\n')
    mismatch = done([], 1, '', 'RuntimeError: different CUDA major versions\n')

    answers[:] = [works]
    setup_env.fix_torchvision(env)
    assert installs == []
    answers[:] = [missing, works]
    setup_env.fix_torchvision(env)
    assert installs == ['installing torchvision-cpu-schemas']
    answers[:] = [mismatch]
    with pytest.raises(setup_env.SetupError, match='different CUDA major versions'):
        setup_env.fix_torchvision(env)
    assert len(installs) == 1


# -------------------------------------------------------------------------------------- Makefile
def test_make_names_a_missing_python(repo, tmp_path):
    result = subprocess.run(
        ['make', 'env', f'VENV={tmp_path / "env"}'],
        cwd=repo,
        env={'PATH': '/usr/bin:/bin', 'PYTHON': ''},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert not os.path.exists(tmp_path / 'env')
    assert 'install Python 3.11 or name one with PYTHON=path' in result.stderr
