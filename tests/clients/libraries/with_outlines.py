"""outlines in its mode for vLLM: QUESTION; prints the word in the file that the question names.

Each form permits one answer, so the model gives it only if the server enforces the form.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Literal

import openai
import outlines  # type: ignore[import-not-found]
from pydantic import BaseModel, create_model

path = next(filter(str.strip, re.findall(r"/\S+", sys.argv[-1])))
word = Path(path).read_text().split()[-1].strip(".")
form: type[BaseModel] = create_model("Form", word=(Literal[word], ...))
model = outlines.from_vllm(openai.OpenAI(), os.environ["OPENAI_MODEL"])
by_schema = form.model_validate_json(model("The word as JSON?", form))
by_pattern = model("The word?", outlines.types.Regex(re.escape(word)))
by_choice = model("The word?", Literal[word])
assert by_schema.model_dump() == {"word": word}, by_schema
assert by_pattern == by_choice == word, (by_pattern, by_choice)
print(word)
