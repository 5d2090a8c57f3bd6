"""The page on which to look inside of models, over HTTP and in a browser."""

import json
import shutil
import threading
import urllib.error
import urllib.request

import pytest

from mala_mm.analysis.explore import ExplorerServer
from mala_mm.analysis.explorer import Explorer
from mala_mm.errors import UserError


@pytest.fixture(scope='module')
def server(folder, model):
    explorer = Explorer([('random', model), ('again', model)], [folder / 'photo.png'], 64)
    with ExplorerServer(explorer, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def get(server, path, data=None):
    try:
        with urllib.request.urlopen(server.address + path, data, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def look(server, query):
    status, body = get(server, f'look?{query}')
    assert status == 200, body
    return json.loads(body)


def test_a_look_has_every_stage_and_mechanism(server):
    setup = json.loads(get(server, 'setup')[1])
    assert setup == dict(models=['random', 'again'], images=['photo.png'])
    found = look(server, 'model=0&image=0&x=10&y=20')
    assert found['point'] == [10, 20] and found['size'] == [64, 32]
    for stage, own in zip(found['stages'], ('mala', 'mala', 'softmax', 'softmax')):
        operators = [m['operator'] for m in stage['maps']]
        assert operators[0] == own and stage['maps'][0]['own']
        assert sorted(operators) == ['linear', 'mala', 'rala', 'softmax']
        for drawn in stage['maps']:
            assert drawn['image'].startswith('data:image/png;base64,')
            assert drawn['low'] <= drawn['high']
        assert {s['operator'] for s in stage['spectra']} == {'linear', 'mala', 'rala'}
        assert all(s['values'][0] == pytest.approx(1) for s in stage['spectra'])
    names = [name for name, _ in found['prediction']['rows']]
    assert sorted(names) == ['ball', 'car', 'tree']
    assert [s['block'] for s in found['stages']] == [2, 1, 1, 1]


def test_block_and_head_are_chosen(server):
    first = look(server, 'model=0&image=0&block=1&head=0')
    assert [s['block'] for s in first['stages']] == [1, 1, 1, 1]
    third = look(server, 'model=0&image=0&head=3')
    assert [s['head'] for s in third['stages']] == [1, 2, 2, 3]  # the last where there are fewer
    assert third['stages'][3]['maps'][0]['high'] != first['stages'][3]['maps'][0]['high']


def test_a_image_can_be_added(server, folder):
    data = (folder / 'photo.png').read_bytes()
    number = json.loads(get(server, 'image?name=mine.png', data)[1])['number']
    assert json.loads(get(server, 'setup')[1])['images'][number] == 'mine.png'
    status, image = get(server, f'image?number={number}')
    assert status == 200 and image[:2] == b'\xff\xd8'
    status, sentence = get(server, 'image?name=no.png', b'no image')
    assert status == 400 and b'no.png cannot be read' in sentence


@pytest.mark.parametrize(
    ('query', 'sentence'),
    [
        ('model=0&image=9', b'the image must be from 0 to'),
        ('model=2&image=0', b'the model must be from 0 to 1, got 2'),
        ('model=0&image=0&x=64&y=0', b'x from 0 to 63 and y from 0 to 31, got (64, 0)'),
        ('model=0&image=0&head=5', b'the head must be from 1 to 4, or 0 for all, got 5'),
        ('model=0&image=0&block=3', b'the block must be from 1 to 2, or -1 for the last, got 3'),
        ('model=zero&image=0', b"model must be an integer, got 'zero'"),
        ('image=0', b'model'),
    ],
)
def test_bad_questions_are_answered_by_a_sentence(server, query, sentence):
    status, body = get(server, f'look?{query}')
    assert status == 400 and sentence in body


def test_there_is_no_other_page(server):
    assert get(server, 'etc/passwd')[0] == 404
    assert get(server, 'look', b'x')[0] == 404


def test_a_port_that_is_taken_is_named(server, model):
    port = server.server_address[1]
    with pytest.raises(UserError, match=f'cannot listen at 127.0.0.1:{port}'):
        ExplorerServer(Explorer([('', model)]), port=port)


def test_a_click_in_a_browser(server):
    """The page as a person sees it."""
    playwright = pytest.importorskip('playwright.sync_api', reason='needs playwright')
    chromium = shutil.which('chromium') or shutil.which('google-chrome')
    if chromium is None:
        pytest.skip('needs Chromium on the PATH')
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=['--no-sandbox'])
        page = browser.new_page(viewport=dict(width=1400, height=1000))
        errors = []
        page.on('pageerror', lambda error: errors.append(error))
        page.goto(server.address)
        page.wait_for_selector('body[data-state=ready]', timeout=60_000)
        assert page.locator('.stage').count() == 4
        assert page.locator('img.scores').count() == 16
        before = page.locator('img.scores').first.get_attribute('src')
        box = page.locator('#image img').bounding_box()
        page.mouse.click(box['x'] + 3, box['y'] + 3)
        page.wait_for_function(
            'before => document.body.dataset.state === "ready" && '
            'document.querySelector("img.scores").src !== before',
            arg=before,
        )
        assert page.locator('#prediction tr').count() == 3
        assert 'negative' in page.locator('#stages').inner_text()
        page.select_option('#head', '4')
        page.wait_for_function('document.querySelector("#stages").innerText.includes("head 4")')
        assert page.locator('#error').inner_text() == '' and not errors
        browser.close()
