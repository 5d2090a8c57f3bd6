"""A wheel of mmcv with compiled operators: from the cache, from find-links, or built here.

Without ``--no-build-isolation`` and ``MMCV_WITH_OPS=1`` mmcv builds a wheel without operators, and
pip would even keep it. So pip's cache stays out of this, and no wheel is used unless it contains
the operators and they load beside the torch of the environment.
"""

from __future__ import annotations  # for the Pythons that are only told they are too old

import json
import os
import re
import tempfile
import zipfile
from pathlib import Path

from environment import Environment, SetupError, locked, pins
from machine import GB, check_compiler


def requirement(line: str) -> tuple:
    """Name and version of the mmcv of a line."""
    return next((n, v) for n, v in pins(f'{line}.txt').items() if n.endswith('mmcv'))


def file_pattern(line: str) -> str:
    """Pattern of the wheels' names, any build and platform."""
    name, version = requirement(line)
    return f'{name.replace("-", "_")}-{version}-*.whl'


def cache_root() -> Path:
    """Folder of the kept wheels."""
    base = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(base) / 'mala_mm' / 'wheels'


def ready_made(line: str) -> bool:
    """Whether some wheel lies in the cache or in find-links; it may turn out not to fit."""
    folders = [*cache_root().glob('*'), *os.environ.get('PIP_FIND_LINKS', '').split()]
    return any(any(Path(folder).glob(file_pattern(line))) for folder in folders)


def provide(env: Environment) -> None:
    """Install mmcv with its operators unless they work already."""
    name, version = requirement(env.line)
    if env.installed().get(name) == version and not env.ask('import mmcv._ext').returncode:
        env.progress.note(f'{name} {version} is there and its operators load')
        return
    torch = describe_torch(env)
    cache = cache_root() / cache_key(torch)
    cache.mkdir(parents=True, exist_ok=True)
    # Under a lock, or two set-ups at a time would compile the same wheel.
    with locked(cache / 'lock', env.progress), tempfile.TemporaryDirectory(dir=cache) as folder:
        wheel = cached(env, cache) or found(env, Path(folder))
        if wheel is None:
            wheel = cache / build(env, Path(folder), torch).name
            os.replace(Path(folder, wheel.name), wheel)
            env.progress.note(f'kept for the next time: {wheel}')
        env.pip(
            *('install', '--no-deps', '--force-reinstall', wheel), what=f'installing {wheel.name}'
        )


def cached(env: Environment, cache: Path) -> Path | None:
    """Return a kept wheel that works here; others are removed."""
    for wheel in cache.glob(file_pattern(env.line)):
        if fault(env, wheel) is None:
            env.progress.note(f'using {wheel}')
            return wheel
        wheel.unlink()
    return None


def found(env: Environment, folder: Path) -> Path | None:
    """Return a wheel from pip's find-links, if one fits."""
    name, version = requirement(env.line)
    env.pip(
        *('download', '--no-index', '--no-deps', '--only-binary', ':all:', '-d', folder),
        f'{name}=={version}',
        what=f'looking for a ready wheel of {name}',
        check=False,
    )
    for wheel in folder.glob('*.whl'):
        reason = fault(env, wheel)
        if reason is None:
            env.progress.note(f'using {wheel.name} from find-links')
            return wheel
        env.progress.note(f'not using {wheel.name} from find-links: {reason}')
        wheel.unlink()
    return None


def build(env: Environment, folder: Path, torch: dict) -> Path:
    """Compile a wheel of mmcv with its operators, minutes."""
    check_compiler()
    if torch['cuda_available'] and not torch['cuda_home']:
        raise SetupError(
            'torch sees a GPU, but the CUDA compiler that builds mmcv was not found: install '
            f'the CUDA {torch["cuda"]} toolkit or name its folder with CUDA_HOME; to do without '
            'the GPU, hide it with CUDA_VISIBLE_DEVICES='
        )
    name, version = requirement(env.line)
    jobs = os.environ.get('MAX_JOBS') or str(parallel_jobs())
    env.progress.note(f'compiling {name} {version} for this machine, once (jobs at a time: {jobs})')
    env.pip(
        *('wheel', '--verbose', '--no-cache-dir', '--no-build-isolation', '--no-deps'),
        *('--no-binary', name, '--wheel-dir', folder, f'{name}=={version}'),
        what=f'compiling {name}',
        MMCV_WITH_OPS='1',
        MAX_JOBS=jobs,
        # In the place of Python's own -g -O3, which takes three times as long.
        CFLAGS=os.environ.get('CFLAGS', '-O2 -DNDEBUG -fwrapv -w'),
    )
    wheel = next(folder.glob('*.whl'))
    reason = fault(env, wheel)
    if reason is not None:
        raise SetupError(f'{wheel.name} was built, but {reason}: see {env.log}')
    return wheel


def fault(env: Environment, wheel: Path) -> str | None:
    """Why the operators of a wheel cannot be used in this environment, if so."""
    try:
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
            members = [n for n in archive.namelist() if re.fullmatch(r'mmcv/_ext[^/]*\.so', n)]
            if not members:
                return 'it holds no compiled operators (mmcv/_ext)'
            library = archive.extract(members[0], folder)
            result = env.ask(
                'import importlib.util as u, torch\n'
                f'spec = u.spec_from_file_location("mmcv._ext", {library!r})\n'
                'spec.loader.exec_module(u.module_from_spec(spec))'
            )
    except zipfile.BadZipFile:
        return 'it is damaged'
    if result.returncode:
        return f'its operators do not load ({result.stderr.strip().splitlines()[-1]})'
    return None


def describe_torch(env: Environment) -> dict:
    """Return what decides whether a compiled wheel fits the torch of the environment."""
    result = env.ask(
        'import json, platform, sys, torch\n'
        'from torch.utils.cpp_extension import CUDA_HOME\n'
        'gpu = torch.cuda.is_available()\n'
        'print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda,\n'
        '    python="cp%d%d" % sys.version_info[:2], machine=platform.machine(),\n'
        '    cuda_available=gpu, cuda_home=CUDA_HOME,\n'
        '    capability=torch.cuda.get_device_capability() if gpu else None)))'
    )
    if result.returncode:
        cause = result.stderr.strip().splitlines()[-1]
        raise SetupError(f'torch in {env.path} cannot be imported ({cause}): install it anew')
    return json.loads(result.stdout.splitlines()[-1])


def cache_key(torch: dict) -> str:
    """Return what a wheel depends on: torch, Python, machine, GPU."""
    key = f'torch-{torch["version"]}-{torch["python"]}-{torch["machine"]}'
    if torch['cuda_available'] or os.environ.get('FORCE_CUDA') == '1':
        architectures = os.environ.get('TORCH_CUDA_ARCH_LIST')
        key += f'-cuda-{architectures or torch["capability"]}'
    return re.sub(r'[^\w.+-]+', '_', key)


def parallel_jobs() -> int:
    """One compiler a core, where memory has the 1.6 GB that each takes."""
    memory = re.search(r'MemAvailable:\s+(\d+) kB', Path('/proc/meminfo').read_text())
    return max(1, min(len(os.sched_getaffinity(0)), int(memory.group(1)) * 1024 // int(1.6 * GB)))
