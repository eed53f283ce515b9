"""The Chinese chat model: a T5 of 0.2 B parameters, pretrained and fine-tuned on questions and answers."""
