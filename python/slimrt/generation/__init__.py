"""Generation of tokens: options, sampling, beam search, speculative decoding, and the scheduler of steps.

Names here, and the usual ones: a guess is a draft token, its odds the accept rate (odds.py, guesser.py, drafts.py);
the loop does continuous batching (loop.py), pace sizes chunks of prefill (pace.py), room allocates cache blocks and
preempts (room.py); a ticket is a task submitted to the loop (tickets.py), a wish what it asks of a step (search.py).
"""
