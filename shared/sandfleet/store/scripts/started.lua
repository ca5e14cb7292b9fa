-- A background job runs: its caller is answered (and whoever asks again), its record stays claimed and its sandbox busy
-- until its deadline.
-- KEYS  1 prefix
-- ARGV  1 op id  2 node  3 incarnation  4 reply  5 lasts ms
-- Returns 1, or 0 when it is not claimed by this incarnation.
--@use time route reply
local op = P .. 'op:' .. A[1]
local o = call('HMGET', op, 'state', 'route', 'reply_to', 'job')
if o[1] ~= 'claimed' then return 0 end
local sid, node, inc = split(o[2])
if node ~= A[2] or inc ~= A[3] then return 0 end
if o[4] then return 1 end
local ms = now_ms()
local deadline = ms + A[5]
-- First a write that a full Redis allows: the rest of the script may then write too.
call('PEXPIREAT', op, string.format('%.0f', deadline + DAY))
call('HSET', op, 'job', 1, 'deadline', string.format('%.0f', deadline), 'reply_to', '', 'reply', A[4])
local busy = P .. 'busy:' .. sid
call('ZADD', busy, string.format('%.0f', deadline + 30000), A[1])
keep(busy, deadline - ms + 60000)
keep(P .. 'inflight:' .. node, deadline - ms + DAY)
-- A client that starts with "!" wants errors only.
if string.byte(o[3]) ~= 33 then reply(o[3], A[1], A[4]) end
return 1
