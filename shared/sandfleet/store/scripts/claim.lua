-- Take the right to start an operation's effect, once. Hot path.
-- KEYS  1 prefix
-- ARGV  1 op id  2 sandbox  3 node  4 incarnation  5 route text
-- Returns {status, now ms}
--@use time
local ms = now_ms()
local op = P .. 'op:' .. A[1]
local o = call('HMGET', op, 'state', 'route', 'start_by', 'expect')
if not o[1] then return { 'gone', ms } end
if o[1] == 'done' or o[1] == 'closed' then return { 'closed', ms } end
if o[2] ~= A[5] then return { 'stale', ms } end
if o[1] == 'claimed' then return { 'already', ms } end
if call('GET', P .. 'lease:' .. A[3]) ~= A[4] then return { 'stale', ms } end
local sb = call('HMGET', P .. 'sandbox:' .. A[2], 'state', 'route')
if sb[2] ~= A[5] or sb[1] ~= o[4] then return { 'stale', ms } end
if tonumber(o[3]) < ms then return { 'late', ms } end
-- First a write that a full Redis allows: what was admitted may run to its end.
call('HDEL', op, 'start_by')
call('HSET', op, 'state', 'claimed', 'claimed', ms)
return { 'claimed', ms }
