/* The refit protocol as a model for spin: one transition from version 0 to 1, two coordinators, two receivers.
 *
 * What can happen: the first coordinator dies at any point, or is only thought dead and goes on beside the second; commits and
 * prepares are decided now and take effect later, or never; replies are lost, so that an outcome is unknown; an attempt fails
 * half way at any receiver, a receiver restarts, an operator aborts. The record changes by compare-and-set on its revision, and
 * by nothing else.
 *
 * What is checked, in every interleaving:
 *   I1  version 1 is committed at most once;
 *   I2  once read_commit has answered "not committed" about an attempt, that attempt is never committed;
 *   I3  at a commit every receiver has completed that attempt, with the right bits, or has restarted since;
 *   I5  a receiver whose gate is open has exactly the bits of the committed version;
 *   I8  an attempt of a replaced coordinator is never committed;
 *   and that no process hangs (spin's check of end states).
 *
 * Planted bugs, each of which must be found (tests/protocol/test_model.py): -DNO_FENCE -DFENCE_IGNORED -DNO_STOP -DEARLY_COMMIT
 * -DNO_EPOCH -DMIXED_RETRY -DSTALE_PREPARE -DBLIND_REOPEN.
 *
 * Claims that must be found false, or the model would prove nothing: -DCLAIM_FIRST_NEVER_COMMITS -DCLAIM_SECOND_NEVER_COMMITS
 * -DCLAIM_NO_RETRY_COMMITS.
 *
 * Run:  spin -a refit.pml && cc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
 * -DNUM_ATTEMPTS=2 and -DQUIET (no restart, no operator) make it smaller. With three attempts there are 14.1 million states
 * (40 s, 1.3 GB); with two, 2 to 3 s.
 */

#define NUM_RECEIVERS 2
#ifndef NUM_ATTEMPTS
#define NUM_ATTEMPTS 3 /* of both coordinators together */
#endif

/* Bits of a receiver's weights. A difference applied to anything but the base gives garbage; an overwrite never does. */
#define BASE 0
#define MIXTURE 1
#define TARGET 2
#define GARBAGE 3

/* ------------------------------------------------------------------ the control record */
byte revision = 1;
byte epoch = 0;
byte version = 0;
byte committed = 0; /* attempt that version 1 came from */
byte bound = 0;     /* attempt; 0 for none */
byte bound_epoch = 0;
bool obsolete = false;
bool admitted = false;

/* ------------------------------------------------------------------ receivers */
byte r_attempt[NUM_RECEIVERS];
byte r_revision[NUM_RECEIVERS];
bool r_mixed[NUM_RECEIVERS];
bool r_open[NUM_RECEIVERS];
bool r_obsolete[NUM_RECEIVERS];
bool r_writing[NUM_RECEIVERS];
byte r_bits[NUM_RECEIVERS];
byte r_completed[NUM_RECEIVERS]; /* attempt that was applied wholly */
bool r_gate_closed[NUM_RECEIVERS];
bool r_restarted[NUM_RECEIVERS]; /* since it was bound to the attempt that the record binds */

/* ------------------------------------------------------------------ what the checks remember */
byte attempts = 0;
bool answered[NUM_ATTEMPTS + 1]; /* read_commit said: not committed */

inline set_committed(attempt) {
    assert(version == 0);         /* I1 */
    assert(!answered[attempt]);   /* I2 */
    assert(r_restarted[0] || (r_completed[0] == attempt && r_bits[0] == TARGET)); /* I3 */
    assert(r_restarted[1] || (r_completed[1] == attempt && r_bits[1] == TARGET));
    assert(bound_epoch == epoch); /* I8 */
    version = 1;
    committed = attempt;
    revision++;
#ifdef CLAIM_FIRST_NEVER_COMMITS
    assert(epoch != 1);
#endif
#ifdef CLAIM_SECOND_NEVER_COMMITS
    assert(epoch != 2);
#endif
#ifdef CLAIM_NO_RETRY_COMMITS
    assert(attempt == 1);
#endif
    skip
}

/* A commit was decided on the record of `seen`; here its swap arrives, whenever that is. */
proctype LateCommit(byte seen; byte attempt) {
    atomic {
        if
        :: revision == seen -> set_committed(attempt)
        :: else -> skip
        fi
    }
}

#ifdef NO_STOP
#define FREE(me) true
#else
#define FREE(me) (r_writing[me] == false)
#endif

/* One receiver: writes what the attempt at hand brings, in two steps, while it is open and not obsolete. */
proctype Receiver(byte me) {
    bool mixed;
    byte attempt;
end:
    do
    :: atomic {
            r_open[me] && !r_obsolete[me] && FREE(me) && r_completed[me] != r_attempt[me] ->
            r_writing[me] = true;
            attempt = r_attempt[me];
            mixed = r_mixed[me];
            assert(r_gate_closed[me]);
            if
            :: mixed && r_bits[me] != BASE -> r_bits[me] = GARBAGE
            :: else -> r_bits[me] = MIXTURE
            fi
        }
        atomic { /* the write that is under way is not interrupted, but it dies with its process */
            if
            :: !r_writing[me] -> skip
            :: r_writing[me] && mixed && (r_bits[me] == GARBAGE || r_attempt[me] != attempt) -> r_bits[me] = GARBAGE
            :: else -> r_bits[me] = TARGET
            fi;
            if
            :: r_writing[me] && r_attempt[me] == attempt && !r_obsolete[me] -> r_completed[me] = attempt
            :: else -> skip
            fi;
            r_writing[me] = false
        }
    od
}

/* The first receiver's process dies and starts again from a checkpoint of version 0, once, at any time. It knows nothing of
 * before and serves nothing until it is told that what it holds is committed. */
proctype Restart() {
    atomic {
        r_bits[0] = BASE; r_attempt[0] = 0; r_revision[0] = 0; r_completed[0] = 0; r_writing[0] = false;
        r_open[0] = false; r_obsolete[0] = false; r_gate_closed[0] = true; r_restarted[0] = true
    }
}

/* An operator fences whatever is bound, once, at any time, and is told that it did not commit. */
proctype Operator() {
    atomic {
        if
        :: bound != 0 && version == 0 && !obsolete -> obsolete = true; revision++; answered[bound] = true
        :: else -> skip
        fi
    }
}

/* ------------------------------------------------------------------ what a coordinator does */

inline fence(attempt) {
#ifndef NO_FENCE
    atomic {
        if
        :: bound == attempt && !obsolete && version == 0 -> obsolete = true; revision++
        :: else -> skip
        fi
    }
#else
    skip
#endif
}

inline stop(attempt) {
    i = 0;
    do
    :: i < NUM_RECEIVERS ->
        atomic {
            if
            :: r_attempt[i] == attempt -> r_obsolete[i] = true
            :: else -> skip
            fi
        }
#ifndef NO_STOP
        (r_attempt[i] != attempt || !r_writing[i]);
#endif
        i++
    :: else -> break
    od
}

inline bind(attempt, seen, is_mixed) {
    i = 0;
    do
    :: i < NUM_RECEIVERS ->
        atomic {
            if
#ifndef STALE_PREPARE
            :: seen <= r_revision[i] -> ok = false /* a later attempt was bound here */
#endif
            :: !FREE(i) -> ok = false
#ifndef STALE_PREPARE
            :: seen > r_revision[i] && FREE(i) ->
#else
            :: FREE(i) ->
#endif
                r_attempt[i] = attempt;
                r_revision[i] = seen;
                r_mixed[i] = is_mixed;
                r_open[i] = false;
                r_obsolete[i] = false;
                r_restarted[i] = (r_restarted[i] && attempt != bound) /* a late prepare of an old coordinator does not heal it */
            fi
        }
        i++
    :: else -> break
    od
}

inline open_apply(attempt) {
    i = 0;
    do
    :: i < NUM_RECEIVERS ->
        atomic {
            if
            :: r_attempt[i] == attempt && !r_obsolete[i] -> r_gate_closed[i] = true; r_open[i] = true
            :: else -> skip
            fi
        }
        i++
    :: else -> break
    od
}

/* Caches are dropped and the gate opens, where the weights are what the record publishes. */
inline reopen(attempt) {
    i = 0;
    do
    :: i < NUM_RECEIVERS ->
        atomic {
            if
#ifndef BLIND_REOPEN
            :: r_attempt[i] == attempt && version == 1 && r_completed[i] == committed && !r_writing[i] -> r_gate_closed[i] = false
#else
            :: true -> r_gate_closed[i] = false
#endif
            :: else -> skip
            fi
        }
        i++
    :: else -> break
    od
}

#ifdef EARLY_COMMIT
#define ACKNOWLEDGED(attempt) (r_completed[0] == attempt || r_completed[1] == attempt)
#else
#define ACKNOWLEDGED(attempt) (r_completed[0] == attempt && r_completed[1] == attempt)
#endif
#ifdef FENCE_IGNORED
#define FENCED false
#else
#define FENCED obsolete
#endif
#ifdef NO_EPOCH
#define MINE true
#else
#define MINE (epoch == my_epoch)
#endif
#ifdef MIXED_RETRY
#define RETRY_IS_MIXED true
#else
#define RETRY_IS_MIXED false
#endif

proctype Coordinator(byte me) {
    byte my_epoch, attempt, seen, old, i;
    bool mixed, ok, unknown;

    /* acquire or take over, in a new epoch. The second one may be wrong about the first being dead. */
    atomic { epoch++; my_epoch = epoch; revision++; old = bound }
    if
    :: old != 0 ->
        fence(old);
        stop(old);
        if /* read_commit */
        :: version == 1 -> attempt = committed; goto publish
        :: version == 0 -> atomic { answered[old] = (version == 0); }
        fi
        if
        :: version == 1 -> attempt = committed; goto publish
        :: else -> skip
        fi
    :: else -> skip
    fi;

again:
    if
    :: attempts == NUM_ATTEMPTS -> goto done /* ask the operator */
    :: else -> skip
    fi;
    atomic {
        if
        :: attempts < NUM_ATTEMPTS -> attempts++; attempt = attempts
        :: else -> goto done
        fi
    }
    atomic { /* prepare binds the record */
        if
        :: !MINE || version == 1 -> goto done /* conflict: touch nothing any more */
        :: else ->
            mixed = (!admitted || RETRY_IS_MIXED);
            bound = attempt; bound_epoch = my_epoch; obsolete = false; admitted = true;
            revision++;
            seen = revision
        fi
    }
    ok = true;
    bind(attempt, seen, mixed);
    if
    :: ok -> open_apply(attempt)
    :: else -> goto recover
    fi;
    if
    :: ACKNOWLEDGED(attempt) -> skip
    :: true -> goto recover /* something failed on the way */
    fi;
    atomic { /* the commit is decided on the record as it is now; its swap arrives now, later or never */
        seen = revision;
        unknown = false;
        if
        :: version == 1 && committed == attempt -> skip
        :: version == 1 && committed != attempt -> goto done
        :: version == 0 && !MINE -> goto done
        :: version == 0 && MINE && (bound != attempt || FENCED) -> goto recover
        :: version == 0 && MINE && bound == attempt && !FENCED ->
            if
            :: set_committed(attempt)
            :: unknown = true; run LateCommit(seen, attempt)
            :: unknown = true /* the request was lost */
            fi
        fi
    }
    if
    :: unknown -> /* read_commit: fence, then read */
        fence(attempt);
        atomic {
            if
            :: version == 1 && committed == attempt -> skip
            :: version == 1 && committed != attempt -> goto lost
            :: version == 0 -> answered[attempt] = true; goto recover
            fi
        }
    :: else -> skip
    fi;

publish:
    reopen(attempt);
    goto done;

recover:
    fence(attempt);
    stop(attempt);
    if
    :: version == 1 && committed == attempt -> goto publish
    :: else -> goto again
    fi;

lost:
    stop(attempt);

done:
    skip
}

/* The first coordinator may die anywhere: its steps just stop. Spin explores that as every prefix of them, because the second
 * one may start at any time and the first one need never move again. */
init {
    atomic {
        run Receiver(0);
        run Receiver(1);
#ifdef NO_STOP
        run Receiver(0); /* nobody waits, so the next attempt writes beside the one before */
#endif
        run Coordinator(0)
    }
#ifndef QUIET
    run Restart();
    run Operator();
#endif
    run Coordinator(1)
}

#define BAD_GATE(i) (!r_gate_closed[i] && !((r_bits[i] == BASE && version == 0) || (r_bits[i] == TARGET && version == 1)))

active proctype Watch() {
end:
    do
    :: atomic { (BAD_GATE(0) || BAD_GATE(1)) -> assert(false) } /* I5 */
    od
}
