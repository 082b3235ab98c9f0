"""Lets several processes that run one program act as one process. No strategy and no Horovod in here."""
