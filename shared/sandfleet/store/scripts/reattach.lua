-- A claimed operation of an earlier incarnation is the new one's, which holds the sandbox that it runs in.
-- KEYS  1 prefix
-- ARGV  1 op id  2 its route text  3 sandbox  4 node  5 new incarnation  6 new route text
-- Returns 1, or 0 when it is not claimed on that route, or the new one is not that of the sandbox and its node.
local op = P .. 'op:' .. A[1]
local o = call('HMGET', op, 'state', 'route')
if o[1] ~= 'claimed' or o[2] ~= A[2] then return 0 end
if call('GET', P .. 'lease:' .. A[4]) ~= A[5] then return 0 end
local sb = call('HMGET', P .. 'sandbox:' .. A[3], 'state', 'route')
if sb[1] ~= 'live' or sb[2] ~= A[6] then return 0 end
-- Behind everything of earlier incarnations, as if it had been recorded now. First a write that a full Redis allows.
call('ZREM', P .. 'inflight:' .. A[4], A[1])
call('ZADD', P .. 'inflight:' .. A[4], call('HINCRBY', P .. 'node:' .. A[4], 'seq', 1), A[1])
call('HSET', op, 'route', A[6])
return 1
