"""Training data: documents, prompts and answers, as a target's tokens."""

from specrun.train.data.answers import AnswerSettings
from specrun.train.data.documents import Answered
from specrun.train.data.prompts import built_in_prompts, most_prompts, own_prompts
