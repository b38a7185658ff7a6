"""The first words of own prompts, by task family; the target goes on from there."""

from __future__ import annotations

OPENINGS = {
    kind: tuple(words.split("|"))
    for kind, words in {
        "chat": "|I|How do I|What do you think about|Can you help me|My friend|I've been|Tell me|Hi|Why do people|"
        "Do you|What should I|I want to|Let's talk about|I feel|Could you recommend|Imagine|It's my",
        "code": "Write a Python function that|Write a function in JavaScript that|Write an SQL query that|"
        "Fix the bug in this code:\n|What does this code do?\n\n```python\n|Implement a class for|"
        "In Python, how do I|Write a bash script that|Write a unit test for|Given a list of|Create an HTML page|"
        "I get an error when|Write a C program that|def|Refactor this function:\n\n|Write a regular expression that",
        "math": "Solve|What is the sum of|A train|If x|Find the|There are|Calculate|A shop sells|How many|Anna has|"
        "What is the probability that|The area of|A farmer|Prove that|In a class of|Simplify",
        "instruct": "Write a short story about|Write a poem about|Give me five|List the|Describe|Write an email to|"
        "Create a plan for|Explain how to|Compare|Suggest|Write a product description for|Write step by step|"
        "Make a table of|Draft a speech|Rewrite this sentence|Classify",
        "qa": "What is|Who|When did|Where is|Why is|How does|Which|What are the|How many|What happened|Is it true|"
        "Who wrote|What causes|How long|What does|In which country",
        "summary": "Summarize the following text:\n\n|Summarise this article in two sentences:\n\n|"
        "Give the main points of this text:\n\n|Write a headline for this story:\n\n|Shorten this paragraph:\n\n|"
        "What is this passage about?\n\n|TL;DR:\n\n|Summarize this conversation:\n\n",
        "translation": "Translate to French:|Translate to Spanish:|Translate into German:|"
        "Translate this sentence into Italian:|How do you say in French|Translate into English: Le|"
        "Translate into English: Der|Translate into English: El|Translate the following into Portuguese:|"
        "What is the Spanish word for|Translate from French to English:|Translate from English to Dutch:",
    }.items()
}
