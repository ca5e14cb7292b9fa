-- Answer an operation: done, reply kept and appended to the client's stream, inflight and busy entries gone. Hot path.
-- KEYS  1 prefix
-- ARGV  1 op id  2 node  3 incarnation  4 outcome  5 reply  6 keep ms  7 only recorded 0|1  8 output stream or ''
-- Returns 1, or 0 when it was answered before, is unknown or is claimed by somebody else (with 7: by anybody).
--@use time route reply output line use
local op = P .. 'op:' .. A[1]
local o = call('HMGET', op, 'state', 'route', 'reply_to', 'effect', 'job')
if not o[1] then
  end_output(A[8], A[4], true)
  return 0
end
local sid, node, inc = split(o[2])
if o[1] ~= 'recorded' and (o[1] ~= 'claimed' or A[7] == '1' or node ~= A[2] or inc ~= A[3]) then return 0 end
local ms = now_ms()
-- First a write that a full Redis allows: the rest of the script may then write too.
call('ZREM', P .. 'inflight:' .. node, A[1])
local was_busy = call('ZREM', P .. 'busy:' .. sid, A[1])
-- An effect's record protects its op id until the expiry it was recorded with; a big reply is not kept that long.
if o[4] == '1' and #A[5] > 4096 then
  call('HSET', op, 'state', 'done', 'outcome', A[4], 'finished', ms)
  call('HDEL', op, 'reply')
  call('SET', P .. 'answer:' .. A[1], A[5], 'PX', A[6])
else
  call('HSET', op, 'state', 'done', 'outcome', A[4], 'finished', ms, 'reply', A[5])
  if o[4] ~= '1' then call('PEXPIRE', op, A[6]) end
end
-- A client that starts with "!" wants errors only.
if A[4] ~= 'ok' or string.byte(o[3]) ~= 33 then reply(o[3], A[1], A[5]) end
end_output(A[8], A[4], o[5])
if was_busy == 1 then
  call('HSET', P .. 'sandbox:' .. sid, 'used', ms)
  settle(sid, o[2], ms)
end
return 1
