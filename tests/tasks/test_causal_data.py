"""Conversations and plain text as rows of a token store."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from brimful.data.encode import LONG_CHARACTERS, Note
from brimful.data.store import Store, trained
from brimful.data.tokenize import RowNotes, TokenizeOptions, tokenize
from brimful.errors import BadData
from brimful.tasks.causal_data import ConversationEncoder, TextEncoder
from brimful.tasks.chat_template import ChatTemplate
from brimful.tasks.pair_data import PairEncoder, TemplatePairs
from brimful.units import GiB
from tests.tasks.chat_tokenizers import save_tokenizer
from tests.tasks.test_chat_template import IM, ROLES, SYSTEM_TALK, TALK, TEMPLATES, TOOL_TALK, TOOLS, questions

ROOMY = TokenizeOptions(host_limit_bytes=8 * GiB)
"""The limit counts the whole process, which after many tests holds more than the default."""


def make_folder(folder, name="chatml", **changes):
    changes = {"special": IM, **changes}
    return save_tokenizer(folder, template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def template(folder):
    return ChatTemplate.load(folder)


def conversations(*talks, tools=None):
    rows = [json.dumps({"messages": talk} | ({"tools": tools} if tools else {})) for talk in talks]
    return pa.record_batch([pa.array(rows, pa.string())], names=["conversation"])


def texts(*rows):
    return pa.record_batch([pa.array(rows, pa.string())], names=["text"])


def unpacked(encoded):
    """The rows as lists of tokens and marks."""
    rows, place = [], 0
    for lengths in encoded.lengths.tolist():
        parts = []
        for length in lengths:
            parts.append(encoded.tokens[place : place + length])
            place += length
        spans = parts[1] if len(parts) > 1 else [0, len(parts[0])]
        rows.append((parts[0].tolist(), trained(spans, len(parts[0])).tolist()))
    assert place == len(encoded.tokens)
    return rows


class TestConversations:
    def test_rows_are_those_of_the_template(self, template):
        encoded = ConversationEncoder(template=template, limit=100)(conversations(TALK, SYSTEM_TALK))
        expected = [*template.encode(TALK), *template.encode(SYSTEM_TALK)]
        assert unpacked(encoded) == [(row.tokens, row.trained) for row in expected]
        assert (encoded.rows_used, encoded.drops, encoded.truncated, encoded.lost_tokens) == (2, [], [0], [0])
        assert encoded.tokens.dtype == np.uint16

    def test_tools_reach_the_template(self, tmp_path):
        template = ChatTemplate.load(make_folder(tmp_path, "qwen2_5"))
        encoded = ConversationEncoder(template=template, limit=1000)(conversations(TOOL_TALK, tools=TOOLS))
        ((tokens, _),) = unpacked(encoded)
        assert tokens == template.encode(TOOL_TALK, TOOLS)[0].tokens
        assert "Tells it." in template.decode(tokens)

    def test_a_long_row_keeps_its_beginning(self, template):
        (whole,) = template.encode(TALK)
        limit = len(whole.tokens) - 3
        encoded = ConversationEncoder(template=template, limit=limit)(conversations(TALK, TALK[:2]))
        rows = unpacked(encoded)
        assert rows[0] == (whole.tokens[:limit], whole.trained[:limit])
        assert (len(rows), encoded.rows_used, encoded.truncated, encoded.lost_tokens) == (2, 2, [1], [3])

    def test_a_row_of_exactly_the_limit_is_not_truncated(self, template):
        limit = len(template.encode(TALK)[0].tokens)
        encoded = ConversationEncoder(template=template, limit=limit)(conversations(TALK))
        assert (encoded.truncated, encoded.lost_tokens) == ([0], [0])

    def test_a_row_without_a_reply_within_the_limit_is_dropped_and_counted(self, template):
        (row,) = template.encode(TALK)
        first = row.trained.index(True)
        for limit, rows in ((first, 0), (first + 1, 1)):
            encoded = ConversationEncoder(template=template, limit=limit)(conversations(TALK))
            assert len(encoded.lengths) == encoded.rows_used == rows
        encoded = ConversationEncoder(template=template, limit=first)(conversations(TALK))
        (drop,) = encoded.drops
        assert (drop.row, drop.reason, drop.refused) == (0, "nothing to train on", False)
        assert f"max_tokens={first}" in drop.message and encoded.truncated == [0]

    def test_a_row_that_the_template_refuses_is_named(self, template):
        bad = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": ""}]
        encoded = ConversationEncoder(template=template, limit=100)(conversations(TALK, bad, TALK))
        (drop,) = encoded.drops
        assert (drop.row, drop.refused, drop.message) == (1, True, "the reply in message 2 is empty")
        assert len(encoded.lengths) == encoded.rows_used == 2

    def test_one_row_per_reply(self, tmp_path):
        template = ChatTemplate.load(make_folder(tmp_path, "replies_twice", special=ROLES))
        encoder = ConversationEncoder(template=template, limit=200)
        encoded = encoder(conversations(TALK))
        assert (len(encoded.lengths), encoded.rows_used) == (2, 1)
        shorter = len(template.encode(TALK)[1].tokens) - 1
        encoded = ConversationEncoder(template=template, limit=shorter)(conversations(TALK))
        assert (encoded.truncated, encoded.lost_tokens) == ([1], [1])

    def test_all_tokens_are_trained_if_asked(self, folder):
        encoder = ConversationEncoder.load(folder, max_tokens=100, train_on="all")
        ((tokens, marks),) = unpacked(encoder(conversations(TALK)))
        assert all(marks) and len(tokens) == len(encoder.template.encode(TALK)[0].tokens)
        assert encoder.method == "all tokens"

    def test_an_empty_batch(self, template):
        encoded = ConversationEncoder(template=template, limit=100)(conversations())
        assert encoded.lengths.shape == (0, 2) and len(encoded.tokens) == 0

    def test_the_key_follows_the_template_and_the_limit(self, template, tmp_path):
        other = ChatTemplate.load(make_folder(tmp_path, "yi"))
        encoders = [
            ConversationEncoder(template=template, limit=100), ConversationEncoder(template=template, limit=101),
            ConversationEncoder(template=other, limit=100), ConversationEncoder(template=template, limit=100, train_on="all"),
        ]  # fmt: skip
        assert len({encoder.key for encoder in encoders}) == 4

    def test_pieces_show_a_row_of_the_store(self, folder):
        encoder = ConversationEncoder.load(folder, max_tokens=100)
        ((tokens, marks),) = unpacked(encoder(conversations(TALK[:2])))
        assert encoder.pieces(tokens, marks)[1] == ("Fine.<|im_end|>", True)


class TestConversationStore:
    def write(self, path, talks):
        path.write_text(
            "".join(json.dumps({"messages": talk}, ensure_ascii=False) + "\n" for talk in talks), encoding="utf-8"
        )
        return str(path)

    def test_from_file_to_masks(self, tmp_path, template):
        talks = [TALK, SYSTEM_TALK, questions(["今天天气很好。", "🙂"])]
        source = self.write(tmp_path / "rows.jsonl", talks)
        encoder = ConversationEncoder(template=template, limit=200)
        report = tokenize(
            [source], tokenizer=template.folder, output=tmp_path / "store", options=ROOMY, encoder=encoder
        )
        store = Store.open(tmp_path / "store")
        assert report.rows_out == len(store) == 3
        for row, talk in zip(store, talks, strict=True):
            (expected,) = template.encode(talk)
            assert row["tokens"].tolist() == expected.tokens
            assert trained(row["spans"], len(row["tokens"])).tolist() == expected.trained

    def test_a_refused_row_is_an_error_with_its_line(self, tmp_path, template):
        source = self.write(tmp_path / "rows.jsonl", [TALK, [TALK[0], {"role": "assistant", "content": " "}]])
        encoder = ConversationEncoder(template=template, limit=200)
        with pytest.raises(BadData, match="rows.jsonl, line 2: .*message 2 is empty"):
            tokenize([source], tokenizer=template.folder, output=tmp_path / "store", options=ROOMY, encoder=encoder)


class TestNotes:
    """What the owner of rows that are kept should know."""

    @pytest.fixture
    def encoder(self, tmp_path):
        folder = make_folder(tmp_path / "actions", special=(*IM, "<|action|>"), plain=("<think>",))
        return ConversationEncoder.load(folder, max_tokens=99)

    def test_what_became_of_special_tokens_in_messages(self, encoder):
        talks = (questions(["<|action|> <think> ok"]), questions(["<|im_end|>"]), questions(["Fine."]))
        assert encoder(conversations(*talks)).notes == [
            Note(0, "special tokens read as tokens", "<|action|>"),
            Note(1, "special tokens read as letters", "<|im_end|>"),
        ]

    def test_of_pairs_as_well(self, encoder):
        pair = {"prompt": TALK[:1], "chosen": {"role": "assistant", "content": "</s>"}, "rejected": TALK[1]}
        rows = pa.record_batch([pa.array([json.dumps(pair)], pa.string())], names=["preference"])
        pairs = PairEncoder(pairs=TemplatePairs(template=encoder.template, limit=99), folder=encoder.template.folder)
        assert pairs(rows).notes == [Note(0, "special tokens read as letters", "</s>")]

    @pytest.mark.parametrize(
        ("roles", "noted"),
        [
            ("user assistant", False),
            ("system user assistant tool assistant user", False),
            ("system developer user assistant tool tool assistant user assistant", False),
            ("user user assistant", True),
            ("assistant user assistant", True),
            ("user assistant assistant", True),
            ("user system assistant", True),
            ("user assistant tool user assistant", True),
        ],
    )
    def test_roles_out_of_order(self, encoder, roles, noted):
        talk = [{"role": role, "content": f"Part {place}."} for place, role in enumerate(roles.split())]
        notes = [note for note in encoder(conversations(talk)).notes if note.reason == "roles out of order"]
        words = roles.split() if len(roles.split()) <= 6 else [*roles.split()[:6], "…"]
        assert [note.message for note in notes] == [f"the roles are {', '.join(words)}"] * noted

    def test_the_store_counts_them_and_names_the_first(self, encoder, tmp_path):
        file = tmp_path / "rows.jsonl"
        talks = [TALK, questions(["<|action|>"]), TALK, questions(["<|action|>"])]
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        folder = encoder.template.folder
        report = tokenize([str(file)], tokenizer=folder, output=tmp_path / "store", options=ROOMY, encoder=encoder)
        expected = {"special tokens read as tokens": RowNotes(2, f"{file}, line 2: <|action|>")}
        assert report.notes == expected == RowNotes.read(tmp_path / "store")


class TestText:
    @pytest.fixture(scope="class")
    @classmethod
    def encoder(cls, folder):
        return TextEncoder.load(folder, max_tokens=16)

    def test_a_document_ends_with_eos(self, encoder):
        ((tokens, marks),) = unpacked(encoder(texts("Hello there!")))
        assert tokens[-1] == encoder.eos_id and tokens.count(encoder.eos_id) == 1 and all(marks)
        assert encoder.tokenizer.decode(tokens[:-1]) == "Hello there!"

    def test_nothing_of_a_long_document_is_lost(self, encoder):
        text = "今天天气怎么样？Hello there! " * 30
        encoded = encoder(texts(text, "Short."))
        rows = [tokens for tokens, _ in unpacked(encoded)]
        assert encoded.rows_used == 2 and max(map(len, rows)) == 16 and len(rows) > 10
        documents = [one for row in rows for one in row]
        ends = [place for place, one in enumerate(documents) if one == encoder.eos_id]
        assert len(ends) == 2 and encoder.tokenizer.decode(documents[: ends[0]]) == text
        assert (encoded.truncated, encoded.lost_tokens) == ([0], [0])

    @pytest.mark.parametrize("words", range(28, 36))
    def test_no_piece_is_a_single_token(self, encoder, words):
        rows = [tokens for tokens, _ in unpacked(encoder(texts("a" * words)))]
        assert min(map(len, rows)) >= 2
        assert encoder.tokenizer.decode([one for row in rows for one in row][:-1]) == "a" * words

    def test_empty_documents_are_dropped_and_counted(self, encoder):
        encoded = encoder(texts("", "Yes.", " \n"))
        assert [(drop.row, drop.reason) for drop in encoded.drops] == [(0, "empty"), (2, "empty")]
        assert encoded.rows_used == len(encoded.lengths) == 1

    def test_special_tokens_in_a_text_are_those_of_transformers_and_noted(self, folder, encoder):
        encoded = encoder(texts("a </s> b", "c", "<|im_start|>d"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        expected = [tokenizer(text)["input_ids"] for text in ("a </s> b", "c", "<|im_start|>d")]
        assert [tokens[:-1] for tokens, _ in unpacked(encoded)] == expected and encoder.eos_id in expected[0]
        reason = "special tokens read as tokens"
        assert encoded.notes == [Note(0, reason, "</s>"), Note(2, reason, "<|im_start|>")]

    def test_a_tokenizer_that_splits_special_tokens_reads_their_letters(self, tmp_path):
        folder = save_tokenizer(tmp_path)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "split_special_tokens": True}))
        encoder = TextEncoder.load(folder, max_tokens=16)
        encoded = encoder(texts("a </s> b"))
        ((tokens, _),) = unpacked(encoded)
        assert tokens.count(encoder.eos_id) == 1 and not encoded.notes

    def test_bos_begins_a_document_if_the_tokenizer_adds_one(self, tmp_path):
        encoder = TextEncoder.load(save_tokenizer(tmp_path, bos="<s>"), max_tokens=4)
        rows = [tokens for tokens, _ in unpacked(encoder(texts("Hello there! How are you?")))]
        bos = encoder.tokenizer.token_to_id("<s>")
        assert rows[0][0] == bos and sum(row.count(bos) for row in rows) == 1

    def test_a_book_is_tokenized_in_parts(self, encoder):
        line = "Probably the Nile, said the assistant.\n"
        text = line * (LONG_CHARACTERS * 2 // len(line) + 10)
        tokens = [one for row, _ in unpacked(encoder(texts(text))) for one in row]
        assert encoder.tokenizer.decode(tokens[:-1]) == text

    @pytest.mark.parametrize("text", ["x" * (LONG_CHARACTERS + 5), " " * 10 + "y" * LONG_CHARACTERS])
    def test_a_book_without_line_ends(self, encoder, text):
        tokens = [one for row, _ in unpacked(encoder(texts(text))) for one in row]
        assert encoder.tokenizer.decode(tokens[:-1]) == text

    def test_needs_no_chat_template(self, tmp_path):
        assert TextEncoder.load(save_tokenizer(tmp_path), max_tokens=8).fields == ("tokens",)

    def test_a_store(self, tmp_path, folder, encoder):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"text": "Hello there! " * count}) + "\n" for count in (1, 9)))
        report = tokenize([str(file)], tokenizer=folder, output=tmp_path / "store", options=ROOMY, encoder=encoder)
        store = Store.open(tmp_path / "store")
        assert report.rows_in == 2 and len(store) > 2 and store.fields == ("tokens",)
        assert sum(len(row["tokens"]) for row in store) == report.fields["tokens"].tokens
