	switch (t->back) {
	default: Uerror("bad return move");
	case  0: goto R999; /* nothing to undo */

		 /* PROC Watch */
;
		
	case 3: // STATE 1
		goto R999;

	case 4: // STATE 7
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* PROC :init: */

	case 5: // STATE 1
		;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 6: // STATE 2
		;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 7: // STATE 3
		;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 8: // STATE 5
		;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 9: // STATE 6
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* PROC Coordinator */

	case 10: // STATE 4
		;
		((P2 *)_this)->old = trpt->bup.ovals[3];
		now.revision = trpt->bup.ovals[2];
		((P2 *)_this)->my_epoch = trpt->bup.ovals[1];
		now.epoch = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 4);
		goto R999;
;
		;
		
	case 12: // STATE 9
		;
		now.revision = trpt->bup.ovals[1];
		now.obsolete = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;
;
		
	case 13: // STATE 13
		goto R999;
;
		
	case 14: // STATE 11
		goto R999;

	case 15: // STATE 16
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 17: // STATE 19
		;
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 18: // STATE 23
		goto R999;
;
		
	case 19: // STATE 21
		goto R999;
;
		;
		
	case 21: // STATE 26
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 23: // STATE 34
		;
		((P2 *)_this)->attempt = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 25: // STATE 37
		;
		now.answered[ Index(((P2 *)_this)->old, 4) ] = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 27: // STATE 42
		;
		((P2 *)_this)->attempt = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 29: // STATE 60
		;
		((P2 *)_this)->attempt = trpt->bup.ovals[1];
		now.attempts = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;

	case 30: // STATE 66
		;
	/* 0 */	((P2 *)_this)->my_epoch = trpt->bup.oval;
		;
		;
		goto R999;

	case 31: // STATE 79
		;
		((P2 *)_this)->ok = trpt->bup.oval;
		;
		goto R999;

	case 32: // STATE 79
		;
		((P2 *)_this)->ok = trpt->bup.ovals[7];
		((P2 *)_this)->seen = trpt->bup.ovals[6];
		now.revision = trpt->bup.ovals[5];
		now.admitted = trpt->bup.ovals[4];
		now.obsolete = trpt->bup.ovals[3];
		bound_epoch = trpt->bup.ovals[2];
		now.bound = trpt->bup.ovals[1];
		((P2 *)_this)->mixed = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 8);
		goto R999;

	case 33: // STATE 80
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 35: // STATE 95
		;
		((P2 *)_this)->i = trpt->bup.ovals[1];
		((P2 *)_this)->ok = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;

	case 36: // STATE 95
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;

	case 37: // STATE 95
		;
		((P2 *)_this)->i = trpt->bup.ovals[1];
		((P2 *)_this)->ok = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;

	case 38: // STATE 95
		;
		((P2 *)_this)->i = trpt->bup.ovals[5];
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[4];
		now.r_open[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[3];
		now.r_mixed[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[2];
		now.r_revision[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[1];
		now.r_attempt[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 6);
		goto R999;

	case 39: // STATE 102
		;
	/* 0 */	((P2 *)_this)->ok = trpt->bup.oval;
		;
		;
		goto R999;

	case 40: // STATE 103
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 42: // STATE 113
		;
		((P2 *)_this)->i = trpt->bup.ovals[2];
		now.r_open[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[1];
		now.r_gate_closed[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 3);
		goto R999;

	case 43: // STATE 113
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;

	case 44: // STATE 113
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 46: // STATE 131
		;
		((P2 *)_this)->unknown = trpt->bup.ovals[1];
		((P2 *)_this)->seen = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;
;
		;
		;
		
	case 48: // STATE 133
		goto R999;
;
		
	case 49: // STATE 155
		goto R999;

	case 50: // STATE 134
		;
	/* 0 */	((P2 *)_this)->attempt = trpt->bup.oval;
		;
		;
		goto R999;

	case 51: // STATE 136
		;
	/* 0 */	((P2 *)_this)->my_epoch = trpt->bup.oval;
		;
		;
		goto R999;
;
		
	case 52: // STATE 138
		goto R999;
;
		;
		
	case 54: // STATE 147
		;
		now.revision = trpt->bup.ovals[2];
		now.committed = trpt->bup.ovals[1];
		now.version = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 3);
		goto R999;
;
		
	case 55: // STATE 153
		goto R999;

	case 56: // STATE 149
		;
		((P2 *)_this)->unknown = trpt->bup.oval;
		;
		goto R999;

	case 57: // STATE 150
		;
	/* 0 */	((P2 *)_this)->seen = trpt->bup.oval;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 58: // STATE 151
		;
		((P2 *)_this)->unknown = trpt->bup.oval;
		;
		goto R999;

	case 59: // STATE 157
		;
	/* 0 */	((P2 *)_this)->unknown = trpt->bup.oval;
		;
		;
		goto R999;

	case 60: // STATE 160
		;
		now.revision = trpt->bup.ovals[1];
		now.obsolete = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;
;
		
	case 61: // STATE 164
		goto R999;
;
		
	case 62: // STATE 162
		goto R999;
;
		;
		;
		
	case 64: // STATE 168
		goto R999;
;
		
	case 65: // STATE 169
		goto R999;

	case 66: // STATE 172
		;
		now.answered[ Index(((P2 *)_this)->attempt, 4) ] = trpt->bup.oval;
		;
		goto R999;

	case 67: // STATE 181
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 69: // STATE 190
		;
		((P2 *)_this)->i = trpt->bup.ovals[1];
		now.r_gate_closed[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;

	case 70: // STATE 190
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;

	case 71: // STATE 190
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;

	case 72: // STATE 200
		;
		now.revision = trpt->bup.ovals[1];
		now.obsolete = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;
;
		
	case 73: // STATE 204
		goto R999;
;
		
	case 74: // STATE 202
		goto R999;

	case 75: // STATE 207
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 77: // STATE 210
		;
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 78: // STATE 214
		goto R999;
;
		
	case 79: // STATE 212
		goto R999;
;
		;
		
	case 81: // STATE 217
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 83: // STATE 230
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 85: // STATE 233
		;
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 86: // STATE 237
		goto R999;
;
		
	case 87: // STATE 235
		goto R999;
;
		;
		
	case 89: // STATE 240
		;
		((P2 *)_this)->i = trpt->bup.oval;
		;
		goto R999;

	case 90: // STATE 248
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* PROC Receiver */

	case 91: // STATE 4
		;
		((P1 *)_this)->mixed = trpt->bup.ovals[2];
		((P1 *)_this)->attempt = trpt->bup.ovals[1];
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 3);
		goto R999;

	case 92: // STATE 7
		;
		now.r_bits[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.ovals[1];
	/* 0 */	((P1 *)_this)->mixed = trpt->bup.ovals[0];
		;
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;
;
		
	case 93: // STATE 11
		goto R999;

	case 94: // STATE 9
		;
		now.r_bits[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.oval;
		;
		goto R999;

	case 95: // STATE 19
		;
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.ovals[1];
		now.r_bits[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;

	case 96: // STATE 19
		;
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.oval;
		;
		goto R999;

	case 97: // STATE 19
		;
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.oval;
		;
		goto R999;

	case 98: // STATE 21
		;
		now.r_completed[ Index(((P1 *)_this)->me, 2) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 99: // STATE 25
		goto R999;
;
		
	case 100: // STATE 23
		goto R999;

	case 101: // STATE 30
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* PROC LateCommit */

	case 102: // STATE 1
		;
	/* 0 */	((P0 *)_this)->seen = trpt->bup.oval;
		;
		;
		goto R999;

	case 103: // STATE 8
		;
		now.revision = trpt->bup.ovals[2];
		now.committed = trpt->bup.ovals[1];
		now.version = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 3);
		goto R999;
;
		
	case 104: // STATE 13
		goto R999;
;
		
	case 105: // STATE 11
		goto R999;

	case 106: // STATE 15
		;
		p_restor(II);
		;
		;
		goto R999;
	}

