"""How people begin what they ask: the target goes on from here and writes the rest of the question itself."""

_LIST = """
Why is / Why are / Why do / Why does / Why did / Why was / Why can't / Why should / What is / What are
What is the / What are the / What was / What were / What does / What do / What happens / What should
What is the difference between / What are some / What are the main / What makes / What would / What causes
How do / How does / How can I / How do I / How to / How is / How are / How did / How can / How would / How many
How much / How does a / How do you / How long / Which / Which of / Who / Who was / When / When did / Where
Where is / Can you / Can you explain / Can you tell me / Could you / Is it / Is there / Are there / Should I
Do / Explain / Explain how / Explain why / Explain the / Describe / Describe a / Describe the / Define / Discuss
Tell me / Tell me about / Tell me a story about / Give me / Give an example of / Give three / List / List five
Write a / Write a short / Write a poem about / Write a story about / Write an essay on / Write an email to
Write a Python function that / Write a function / Write a program that / In Python, how / Fix the / Create a
Summarize / Summarize the / Summarise this text: / Translate / Rewrite / Rephrase this sentence: / Correct
Compare / Compare the / Name / Name three / Suggest / Recommend / Help me / I want to / I need / I am / I'm / My
Please / Make a list of / Plan / Design / Calculate / Solve / If / Imagine / Suppose / The / Hello / Hi / Let's
In a few sentences, / In one sentence, / Briefly / Step by step, / Answer in a few words:
"""

STARTERS = tuple(text.strip() for line in _LIST.strip().splitlines() for text in line.split(" / "))
